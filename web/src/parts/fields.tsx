// Labelled controls of forms. Every control takes its name from its label.

import { ComponentChildren } from 'preact'
import { useId, useState } from 'preact/hooks'
import { minutes, parseMinutes } from '../time'

interface Named { name: string; label: string; id?: string; note?: ComponentChildren }

/** Puts a label above a control and a note below it. */
export function Field(p: { id: string; label: string; note?: ComponentChildren; children: ComponentChildren }) {
  return (
    <div class="field">
      <label for={p.id}>{p.label}</label>
      {p.children}
      {p.note && <span id={`${p.id}-note`} class="muted small">{p.note}</span>}
    </div>
  )
}

export function TextField(p: Named & { value?: string; required?: boolean; max?: number; holder?: string; type?: 'text' | 'number' | 'password' | 'datetime-local'; min?: number; list?: string[]; onInput?: (v: string) => void }) {
  const own = useId()
  const id = p.id ?? own
  return (
    <Field id={id} label={p.label} note={p.note}>
      <input id={id} name={p.name} type={(p.type ?? 'text') as 'text'} min={p.min} required={p.required} maxLength={p.max ?? 256} placeholder={p.holder} defaultValue={p.value} list={p.list ? `${id}-list` : undefined} autoComplete="off" spellcheck={false}
        aria-describedby={p.note ? `${id}-note` : undefined} onInput={p.onInput && ((e) => p.onInput!(e.currentTarget.value))} />
      {p.list && <datalist id={`${id}-list`}>{p.list.map((v) => <option key={v} value={v} />)}</datalist>}
    </Field>
  )
}

export function SelectField(p: Named & { value?: string; options: [value: string, text: string][]; required?: boolean; onChange?: (v: string) => void }) {
  const own = useId()
  const id = p.id ?? own
  return (
    <Field id={id} label={p.label} note={p.note}>
      <select id={id} name={p.name} required={p.required} aria-describedby={p.note ? `${id}-note` : undefined} onChange={p.onChange && ((e) => p.onChange!(e.currentTarget.value))}>
        {p.options.map(([v, text]) => <option key={v} value={v} selected={v === (p.value ?? '')}>{text}</option>)}
      </select>
    </Field>
  )
}

export function CheckField(p: { name: string; id?: string; checked?: boolean; children: ComponentChildren; onChange?: (v: boolean) => void }) {
  return <label class="check"><input type="checkbox" name={p.name} id={p.id} defaultChecked={p.checked} onChange={p.onChange && ((e) => p.onChange!(e.currentTarget.checked))} /> <span>{p.children}</span></label>
}

/** A duration field. It shows how the input was interpreted. */
export function DurationField(p: Named & { minutes?: number; inherit?: string; required?: boolean; onInput?: (text: string) => void }) {
  const own = useId()
  const id = p.id ?? own
  const [text, setText] = useState(p.minutes === undefined ? '' : minutes(p.minutes))
  const read = parseMinutes(text)
  const wrong = text.trim() !== '' && read === null
  const input = (e: { currentTarget: HTMLInputElement }) => {
    const v = e.currentTarget.value
    e.currentTarget.setCustomValidity(v.trim() !== '' && parseMinutes(v) === null ? 'Enter a duration such as 45 min, 1h 30m or 2 days.' : '')
    setText(v)
    p.onInput?.(v)
  }
  return (
    <Field id={id} label={p.label} note={wrong ? <span class="bad">Enter a duration such as 45 min, 1h 30m or 2 days.</span> : read !== null && /^[\d.:\s]+$/.test(text) ? `= ${minutes(read)}` : p.note}>
      <input id={id} name={p.name} value={text} required={p.required} maxLength={32} placeholder={p.inherit ?? 'such as 45 min, 1h 30m, 2 days'} autoComplete="off" aria-invalid={wrong || undefined} aria-describedby={`${id}-note`} onInput={input} />
    </Field>
  )
}

/** Tags, one KEY=VALUE per line. */
export function TagsField(p: Named & { tags?: Record<string, string> }) {
  const own = useId()
  const id = p.id ?? own
  return (
    <Field id={id} label={p.label} note="One per line, such as team=network">
      <textarea id={id} name={p.name} rows={2} defaultValue={Object.entries(p.tags ?? {}).map(([k, v]) => `${k}=${v}`).join('\n')} aria-describedby={`${id}-note`} />
    </Field>
  )
}

/** Reads "KEY=VALUE" lines, or parts between commas. */
export function tagsOf(text: string): Record<string, string> {
  const out: Record<string, string> = {}
  for (const part of text.split(/[\n,]/).map((x) => x.trim()).filter(Boolean)) {
    const at = part.indexOf('=')
    out[at < 0 ? part : part.slice(0, at).trim()] = at < 0 ? '' : part.slice(at + 1).trim()
  }
  return out
}

export const listOf = (text: string) => text.split(/[,\s]+/).filter(Boolean)
