// Dialogs that assign policies and schedules and add exceptions.

import { useState } from 'preact/hooks'
import { ask, List } from '../api'
import { useResource } from '../resource'
import { Override, Policy, scope, selector, whom, workersOf } from '../rules'
import { Form, text } from './form'

export function Apply(p: { what: 'policy' | 'schedule'; name: string; text: string; onClose: () => void }) {
  const send = async (f: FormData) => {
    const path = p.what === 'policy' ? '/policies/' : '/schedules/'
    const workers = text(f, 'workers')
    const chosen = selector(await workersOf(workers), text(f, 'tags'), text(f, 'region'), !!f.get('all'))
    const body = { ...chosen, ...(text(f, 'priority') ? { priority: Number(text(f, 'priority')) } : {}) }
    await ask('POST', `${path}${encodeURIComponent(p.name)}/apply`, body)
    return `Applied ${p.name} to ${chosen.all ? 'the whole fleet' : scope({ ...chosen, worker_ids: workers ? [workers] : undefined })}.`
  }
  return (
    <Form title={`Apply ${p.name}`} submit="Apply" onClose={p.onClose} send={send}>
      <p>{p.name}: {p.text}.</p>
      <Whom id="a" what="Whole fleet, including future workers" />
      <label for="a-priority">Group priority</label><input id="a-priority" name="priority" type="number" />
      <p class="muted small">Named workers get it directly. Tags and regions match future workers too.</p>
    </Form>
  )
}

/** The workers to which a rule applies. Empty means none. */
function Whom(p: { id: string; what: string }) {
  const all = useResource<List<{ id: string; name: string }>>('/workers?limit=1000')
  return (
    <>
      <label for={`${p.id}-workers`}>Workers, by name</label><input id={`${p.id}-workers`} name="workers" list={`${p.id}-names`} autocomplete="off" />
      <datalist id={`${p.id}-names`}>{(all.value?.items ?? []).map((w) => <option key={w.id} value={w.name} />)}</datalist>
      <label for={`${p.id}-tags`}>Or tags, such as team=ml, env=lab</label><input id={`${p.id}-tags`} name="tags" />
      <label for={`${p.id}-region`}>Or region</label><input id={`${p.id}-region`} name="region" maxLength={32} />
      <label class="check"><input type="checkbox" name="all" id={`${p.id}-all`} /> {p.what}</label>
    </>
  )
}

/** Adds an exception with an end, for one worker or a selection. */
export function Except(p: { policies: Policy[]; worker?: { id: string; name: string }; onClose: () => void }) {
  const [kind, setKind] = useState('keep')
  const byDay = kind === 'keep' || kind === 'skip'
  const send = async (f: FormData) => {
    const at = (name: string) => text(f, name) ? new Date(text(f, name)).toISOString() : ''
    const body: Record<string, unknown> = { kind, reason: text(f, 'reason') }
    const s = p.worker ? { worker_ids: [p.worker.id] } as ReturnType<typeof selector> : selector(await workersOf(text(f, 'workers')), text(f, 'tags'), text(f, 'region'), !!f.get('all'))
    if (s.all) body.all = true
    else body.selector = s
    if (at('from')) body.from = at('from')
    if (at('until')) body.until = at('until')
    if (kind === 'policy') body.policy = text(f, 'policy')
    const { value } = await ask<Override>('POST', '/overrides', body)
    return `Added an exception for ${whom(value)}.`
  }
  return (
    <Form title={p.worker ? `Add exception for ${p.worker.name}` : 'Add exception'} submit="Add" onClose={p.onClose} send={send}>
      <label for="o-kind">Exception</label>
      <select id="o-kind" value={kind} onChange={(e) => setKind(e.currentTarget.value)}>
        <option value="keep">keep running</option>
        <option value="skip">skip the schedule</option>
        <option value="freeze">freeze: no automatic stops or starts</option>
        <option value="policy">use another policy</option>
      </select>
      {kind === 'policy' && <><label for="o-policy">Policy</label><select id="o-policy" name="policy">{p.policies.map((x) => <option key={x.name}>{x.name}</option>)}</select></>}
      {!p.worker && <Whom id="o" what="Whole fleet, including workers added meanwhile" />}
      <label for="o-from">Start (default: now)</label><input id="o-from" name="from" type="datetime-local" />
      <label for="o-until">End{byDay && ' (default: end of today)'}</label><input id="o-until" name="until" type="datetime-local" required={!byDay} />
      <label for="o-reason">Reason</label><input id="o-reason" name="reason" maxLength={256} />
    </Form>
  )
}

