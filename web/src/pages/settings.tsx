// Settings of the fleet: what holds, where it came from, and changing it.

import { useState } from 'preact/hooks'
import { ask, Problem, Setting } from '../api'
import type { PageProps } from '../router'
import { Resource, useResource } from '../resource'
import { attempt, Button, Card, Dialog, Fault, Loading, words } from '../parts/ui'
import { Channel, ChannelForm, channelsKey, Settings, tells } from '../parts/channels'

const groups: [string, (key: string) => boolean][] = [
  ['Idle detection', (k) => k.startsWith('worker_') || k.startsWith('idle_') || k.startsWith('min_') || k.startsWith('scale_') || k.startsWith('drain_')],
  ['Everything else', () => true],
]

export function SettingsPage(p: PageProps) {
  const all = useResource<Settings>('/settings', { on: (e) => e.action.includes('settings'), revision: (v) => v.revision })
  const [editing, setEditing] = useState<Setting | null>(null)
  if (!all.value) return <><h1>Settings</h1>{all.problem ? <Fault problem={all.problem} retry={all.reload} /> : <Loading what="the settings" />}</>
  const left = new Set(all.value.items.map((s) => s.key))
  return (
    <>
      <h1>Settings</h1>
      <p class="headline">Settings of the whole fleet and the source of each value. {p.role !== 'admin' && 'An admin can change it.'}</p>
      {groups.map(([title, takes]) => {
        const mine = all.value!.items.filter((s) => left.has(s.key) && takes(s.key))
        for (const s of mine) left.delete(s.key)
        return mine.length === 0 ? null : (
          <Card key={title} title={title} class="flush">
            <div class="scroll" tabIndex={0} role="region" aria-label={title}>
              <table class="asrows">
                <thead><tr><th scope="col">Setting</th><th scope="col">Value</th><th scope="col">From</th><th scope="col"><span class="hidden">Change</span></th></tr></thead>
                <tbody>
                  {mine.map((s) => (
                    <tr key={s.key}>
                      <th scope="row">{s.doc}<div class="small"><code>{s.key}</code></div></th>
                      <td class="value">{shown(s)}</td>
                      <td>{words(s.source)}</td>
                      <td>{p.role === 'admin' && (pinned(s) ? <span class="muted small">fixed by the {s.source === 'env' ? 'environment' : 'command line'}</span> : <Button kind="plain" label={`Change ${s.key}`} onClick={() => setEditing(s)}>Change</Button>)}</td>
                    </tr>
                  ))}
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

function shown(s: Setting): string {
  if (s.key === channelsKey) return Object.entries((s.value ?? {}) as Record<string, Channel>).map(([name, c]) => `${name}: ${tells(c)}`).join('\n') || 'none'
  if (typeof s.value === 'boolean') return s.value ? 'on' : 'off'
  if (Array.isArray(s.value)) return s.value.join(', ')
  if (typeof s.value === 'object' && s.value !== null) return JSON.stringify(s.value, null, 1)
  const text = String(s.value ?? '')
  return text === '' ? '–' : text + (s.unit ? ` ${s.unit}` : '')
}

function Edit(p: { setting: Setting; all: Resource<Settings>; onClose: () => void }) {
  const s = p.setting
  const object = typeof s.value === 'object' && s.value !== null && !Array.isArray(s.value)
  const [text, setText] = useState(Array.isArray(s.value) ? s.value.join(', ') : object ? JSON.stringify(s.value, null, 2) : String(s.value ?? ''))
  const [problem, setProblem] = useState<Problem | null>(null)
  const put = async (value: unknown) => {
    setProblem(null)
    try {
      const a = await ask<Settings>('PATCH', '/settings', { [s.key]: value })
      p.all.put(a.value, a.value.revision)
      await attempt(`${s.key} is changed.`, async () => {})
      p.onClose()
    } catch (e) {
      setProblem(e instanceof Problem ? e : new Problem(0, '', String(e)))
    }
  }
  const save = () => {
    if (typeof s.value === 'boolean') return put(text === 'true')
    if (typeof s.value === 'number') return put(/^-?\d+$/.test(text.trim()) ? Number(text) : text)
    if (Array.isArray(s.value)) return put(text.split(',').map((x) => x.trim()).filter(Boolean))
    if (!object) return put(text)
    try { return put(JSON.parse(text)) } catch (e) { setProblem(new Problem(0, '', `This is not JSON: ${e instanceof Error ? e.message : e}`)); return }
  }
  return (
    <Dialog title={`Change ${s.key}`} onClose={p.onClose}>
      <p class="muted">{s.doc}</p>
      <form onSubmit={(e) => { e.preventDefault(); void save() }}>
        <label for="value">Value{s.unit ? ` in ${s.unit}` : ''}</label>
        {typeof s.value === 'boolean'
          ? <select id="value" value={text} onChange={(e) => setText(e.currentTarget.value)}><option value="true">on</option><option value="false">off</option></select>
          : object ? <textarea id="value" rows={8} value={text} onInput={(e) => setText(e.currentTarget.value)} />
          : <input id="value" value={text} onInput={(e) => setText(e.currentTarget.value)} aria-invalid={problem ? true : undefined} />}
        {problem && <Fault problem={problem} what="Nothing is changed." />}
        <div class="actions">
          {s.source === 'stored' && <Button onClick={() => put(null)}>Return to what lies below</Button>}
          <button type="button" onClick={p.onClose}>Cancel</button>
          <button type="submit" class="primary">Save</button>
        </div>
      </form>
    </Dialog>
  )
}
