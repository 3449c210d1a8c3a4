// Fleet settings: each value, its source, and a form to change it.

import { useState } from 'preact/hooks'
import { ask, Setting } from '../api'
import type { PageProps } from '../router'
import { Resource, useResource } from '../resource'
import { minutes, parseMinutes } from '../time'
import { attempt, Button, Card, Empty, Fault, Loading, words } from '../parts/ui'
import { Field } from '../parts/fields'
import { Form } from '../parts/form'
import { Channel, ChannelForm, channelsKey, Settings, tells } from '../parts/channels'

const starts = (...prefixes: string[]) => (k: string) => prefixes.some((x) => k.startsWith(x))

const groups: [string, (key: string) => boolean][] = [
  ['Idle detection', starts('worker_idle', 'worker_activity', 'idle_')],
  ['Pausing and resuming', starts('worker_', 'drain_', 'wake_')],
  ['Fleet size', starts('scale_', 'min_', 'max_', 'provisioning_')],
  ['AWS and discovery', starts('aws_', 'discovery_', 'tag_', 'reconcile_')],
  ['CML and agents', starts('cml_', 'agent_')],
  ['Notifications', starts('notify_')],
  ['Audit log', starts('audit_')],
  ['Other', () => true],
]

export function SettingsPage(p: PageProps) {
  const all = useResource<Settings>('/settings', { on: (e) => e.action.includes('settings'), revision: (v) => v.revision })
  const [editing, setEditing] = useState<Setting | null>(null)
  const [search, setSearch] = useState(p.place.query.get('q') ?? '')
  if (!all.value) return <><h1>Settings</h1>{all.problem ? <Fault problem={all.problem} retry={all.reload} /> : <Loading what="the settings" />}</>
  const words_ = search.toLowerCase().split(/\s+/).filter(Boolean)
  const left = new Map(all.value.items.filter((s) => words_.every((w) => `${s.key} ${s.doc}`.toLowerCase().includes(w))).map((s) => [s.key, s]))
  return (
    <>
      <h1>Settings</h1>
      <p class="headline">Settings of the whole fleet and the source of each value. {p.role !== 'admin' && 'Only admins can change them.'}</p>
      <div class="filters"><label class="grow"><span class="hidden">Search settings</span><input type="search" placeholder="Search settings…  ( / )" value={search} maxLength={64} onInput={(e) => setSearch(e.currentTarget.value)} /></label></div>
      {left.size === 0 && <Empty title="No matching settings" />}
      {groups.map(([title, takes]) => {
        const mine = [...left.values()].filter((s) => takes(s.key))
        for (const s of mine) left.delete(s.key)
        return mine.length === 0 ? null : (
          <Card key={title} title={title} class="flush">
            <div class="scroll" tabIndex={0} role="region" aria-label={title}>
              <table class="asrows settings">
                <thead><tr><th scope="col">Setting</th><th scope="col">Value</th><th scope="col">Default</th><th scope="col">From</th><th scope="col"><span class="hidden">Change</span></th></tr></thead>
                <tbody>
                  {mine.map((s) => {
                    const usual = shown(s, s.value) === shown(s, defaultOf(s))
                    return (
                      <tr key={s.key}>
                        <th scope="row">{s.doc}<div class="small"><code>{s.key}</code></div></th>
                        <td class="value">{usual ? shown(s, s.value) : <strong>{shown(s, s.value)}</strong>}</td>
                        <td class="value muted none">{usual ? '' : shown(s, defaultOf(s))}</td>
                        <td>{words(s.source)}</td>
                        <td>{p.role === 'admin' && (pinned(s) ? <span class="muted small">set by the {s.source === 'env' ? 'environment' : 'command line'}</span> : <Button kind="plain" label={`Change ${s.key}`} onClick={() => setEditing(s)}>Change</Button>)}</td>
                      </tr>
                    )
                  })}
                </tbody>
              </table>
            </div>
          </Card>
        )
      })}
      {editing?.key === channelsKey && <ChannelForm all={all} onClose={() => setEditing(null)} />}
      {editing && editing.key !== channelsKey && <Edit setting={editing} all={all} onClose={() => setEditing(null)} />}
    </>
  )
}

const pinned = (s: Setting) => s.source === 'flag' || s.source === 'env'

/** The default, which the API gives as text, as a value of the setting's own kind. */
function defaultOf(s: Setting): unknown {
  const text = String(s.default ?? '')
  if (typeof s.value === 'boolean') return text === 'true'
  if (typeof s.value === 'number') return Number(text)
  if (Array.isArray(s.value)) return text.split(',').filter(Boolean)
  if (typeof s.value === 'object' && s.value !== null) return text === '' || text === '{}' ? {} : text
  return text
}

/** How many of a unit a minute has, for the units that are times. */
const perMinute: Record<string, number> = { seconds: 60, minutes: 1, hours: 1 / 60, days: 1 / 1440 }

function shown(s: Setting, v: unknown): string {
  if (s.key === channelsKey) return Object.entries((v ?? {}) as Record<string, Channel>).map(([name, c]) => `${name}: ${tells(c)}`).join('\n') || 'none'
  if (typeof v === 'boolean') return v ? 'on' : 'off'
  if (Array.isArray(v)) return v.join(', ') || '–'
  if (typeof v === 'object' && v !== null) return Object.keys(v).length === 0 ? 'none' : JSON.stringify(v, null, 1)
  const text = String(v ?? '')
  if (text === '') return '–'
  const unit = s.unit ? ` ${s.unit}` : ''
  const times = s.unit && perMinute[s.unit]
  const told = times && typeof v === 'number' && v > 0 ? minutes(v / times) : ''
  return text + unit + (told && !(s.unit === 'minutes' && v as number < 60) && s.unit !== 'days' && !(s.unit === 'seconds' && v as number < 60) ? ` (${told})` : '')
}

function Edit(p: { setting: Setting; all: Resource<Settings>; onClose: () => void }) {
  const s = p.setting
  const object = typeof s.value === 'object' && s.value !== null && !Array.isArray(s.value)
  const times = s.unit ? perMinute[s.unit] : undefined
  const [given, setText] = useState(Array.isArray(s.value) ? s.value.join(', ') : object ? JSON.stringify(s.value, null, 2) : String(s.value ?? ''))
  /** The value of what was typed. A duration with a unit of its own is converted. */
  const value = (): unknown => {
    const t = given.trim()
    if (typeof s.value === 'boolean') return given === 'true'
    if (typeof s.value === 'number') {
      if (/^-?\d+$/.test(t)) return Number(t)
      const m = times ? parseMinutes(t) : null
      if (m === null) throw new Error(times ? `Invalid duration "${t}". Use a format such as 45 min or 1h 30m.` : `Invalid number "${t}".`)
      return Math.round(m * times!)
    }
    if (Array.isArray(s.value)) return given.split(',').map((x) => x.trim()).filter(Boolean)
    if (!object) return given
    try { return JSON.parse(given) } catch (e) { throw new Error(`Invalid JSON: ${e instanceof Error ? e.message : e}`) }
  }
  const put = async (v: unknown) => {
    const a = await ask<Settings>('PATCH', '/settings', { [s.key]: v })
    p.all.put(a.value, a.value.revision)
    return `Saved ${s.key}.`
  }
  let told = ''
  if (times) {
    const m = /^\d+$/.test(given.trim()) ? Number(given) / times : parseMinutes(given)
    told = m === null ? '' : `= ${minutes(m)}`
  }
  const usual = shown(s, defaultOf(s))
  return (
    <Form title={`Change ${s.key}`} submit="Save" onClose={p.onClose} send={async () => put(value())}
      also={s.source === 'stored' && <Button onClick={async () => { if (await attempt(`Reset ${s.key} to its default.`, () => put(null))) p.onClose() }}>Reset</Button>}>
      <p class="muted">{s.doc}</p>
      <Field id="value" label={`Value${s.unit ? ` in ${s.unit}` : ''}`} note={[told, `Default: ${usual}`].filter(Boolean).join('. ')}>
        {typeof s.value === 'boolean'
          ? <select id="value" value={given} onChange={(e) => setText(e.currentTarget.value)}><option value="true">on</option><option value="false">off</option></select>
          : object ? <textarea id="value" rows={8} value={given} onInput={(e) => setText(e.currentTarget.value)} />
          : <input id="value" value={given} autoComplete="off" aria-describedby="value-note" onInput={(e) => setText(e.currentTarget.value)} />}
      </Field>
    </Form>
  )
}
