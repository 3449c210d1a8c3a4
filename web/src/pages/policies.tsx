// Policies: what they say, whom they hold for, and exceptions with an end.

import { ComponentChildren } from 'preact'
import { useState } from 'preact/hooks'
import { ask, Entry, List, Problem } from '../api'
import type { PageProps } from '../app'
import { useResource } from '../resource'
import { Budget, Group, Override, overrideKinds, Policy, PolicyValues, scope, selector, whom, workersOf } from '../rules'
import { minutes } from '../time'
import { attempt, Button, Card, Dialog, Fault, Loading, Time } from '../ui'

const rules = (e: Entry) => /^(policy|budget|schedule|override)_/.test(e.action)

/** What a policy says, in a sentence. */
export function says(v: PolicyValues): string {
  const parts: string[] = []
  if (v.enabled === false) parts.push('never pauses for idleness')
  if (v.idle_timeout_minutes !== undefined) parts.push(`${v.pause_action === 'hibernate' ? 'hibernates' : v.pause_action === 'auto' ? 'hibernates or stops' : 'pauses'} after ${minutes(v.idle_timeout_minutes)}`)
  else if (v.pause_action) parts.push(`pauses by ${v.pause_action}`)
  if (v.warn_before_minutes !== undefined) parts.push(v.warn_before_minutes === 0 ? 'without a warning' : `warns ${minutes(v.warn_before_minutes)} before`)
  if (v.snooze_minutes !== undefined) parts.push(`protects ${minutes(v.snooze_minutes)} after a resume`)
  if (v.check_interval_minutes !== undefined) parts.push(`looks every ${minutes(v.check_interval_minutes)}`)
  if (v.activity_sources) parts.push(`reads ${v.activity_sources.join(', ')}`)
  if (v.signals) parts.push(`counts ${v.signals.join(', ')}`)
  if (v.accepted_risks?.length) parts.push(`accepts ${v.accepted_risks.join(', ')}`)
  if (v.schedule) parts.push(`keeps the schedule ${v.schedule}${v.force ? ', even in use' : ''}`)
  if (v.shadow) parts.push('only records what it would do')
  return parts.length === 0 ? 'says nothing yet' : parts.join('; ')
}

export function Policies(p: PageProps) {
  const all = useResource<List<Policy>>('/policies?limit=1000', { on: rules })
  const groups = useResource<List<Group>>('/policy-groups', { on: rules })
  const overrides = useResource<List<Override>>('/overrides', { on: rules, every: 30_000 })
  const budgets = useResource<List<Budget>>('/budgets', { on: rules, every: 30_000 })
  const [editing, setEditing] = useState<Policy | 'new' | null>(null)
  const [applying, setApplying] = useState<Policy | null>(null)
  const [excepting, setExcepting] = useState(false)
  const admin = p.role === 'admin'
  const end = (what: string, path: string, reload: () => void) => attempt(what, () => ask('DELETE', path)).then(reload)
  return (
    <>
      <h1>Policies</h1>
      <p class="headline">When idle workers are paused. A worker's own values come before its policy, that before its group's, and that before the fleet's <a href="/settings">settings</a>.</p>
      <div class="actions commands">
        {admin && <Button kind="primary" onClick={() => setEditing('new')}>New policy</Button>}
        {p.operator && <Button onClick={() => setExcepting(true)}>Make an exception</Button>}
        <a class="button" href="/preview">Preview a policy</a>
      </div>
      {all.problem && <Fault problem={all.problem} retry={all.reload} />}
      {!all.value ? !all.problem && <Loading what="the policies" /> : (
        <Card title="Named policies" class="flush">
          <div class="scroll" tabIndex={0} role="region" aria-label="Named policies">
            <table class="asrows">
              <thead><tr><th scope="col">Name</th><th scope="col">Says</th><th scope="col">Holds for</th><th scope="col"><span class="hidden">Commands</span></th></tr></thead>
              <tbody>
                {all.value.items.map((x) => (
                  <tr key={x.name}>
                    <th scope="row">{x.name}<div class="muted small">{x.description}{x.shipped && ' (comes with lull)'}</div></th>
                    <td>{says(x)}</td>
                    <td>{(groups.value?.items ?? []).filter((g) => g.policy === x.name).map((g) => scope(g.selector)).join('; ') || <span class="muted">only those it is put on</span>}</td>
                    <td class="nowrap">
                      {x.idle_timeout_minutes !== undefined && <a href={`/preview?policy=${encodeURIComponent(x.name)}`} aria-label={`Preview ${x.name}`}>Preview</a>}{' '}
                      {admin && <Button kind="plain" label={`Apply ${x.name}`} onClick={() => setApplying(x)}>Apply</Button>}{' '}
                      {admin && <Button kind="plain" label={`Edit ${x.name}`} onClick={() => setEditing(x)}>Edit</Button>}{' '}
                      {admin && !x.shipped && <Button kind="plain" label={`Remove ${x.name}`} onClick={() => end(`${x.name} is removed.`, `/policies/${encodeURIComponent(x.name)}`, all.reload)}>Remove</Button>}
                    </td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        </Card>
      )}
      <Card title="Exceptions">
        {(overrides.value?.items ?? []).length === 0 ? <p class="muted">None is in force. "Keep until 22:00", "not today" and a freeze are made here, for one worker, for some or for the whole fleet.</p> : (
          <ul class="history">
            {overrides.value!.items.map((o) => (
              <li key={o.id}>
                <span><strong>{overrideKinds(o)}</strong> {whom(o)}, until <Time at={o.until} as="clock" /> {p.operator && <Button kind="plain" label={`End the exception for ${whom(o)}`} onClick={() => end('The exception has ended.', `/overrides/${o.id}`, overrides.reload)}>End it</Button>}</span>
                <span class="muted small">by {o.by}{o.reason && `: ${o.reason}`}{new Date(o.from).getTime() > Date.now() && <>, from <Time at={o.from} as="clock" /></>}</span>
              </li>
            ))}
          </ul>
        )}
      </Card>
      <Card title="Groups" class="flush">
        {(groups.value?.items ?? []).length === 0 ? <p class="muted">No policy or schedule is put on a group yet.</p> : (
          <div class="scroll" tabIndex={0} role="region" aria-label="Groups"><table class="asrows">
            <thead><tr><th scope="col">Workers</th><th scope="col">Policy</th><th scope="col">Schedule</th><th scope="col">Priority</th><th scope="col"><span class="hidden">Remove</span></th></tr></thead>
            <tbody>{groups.value!.items.map((g) => <tr key={g.id}><th scope="row">{scope(g.selector)}</th><td>{g.policy || '–'}</td><td>{g.schedule || '–'}</td><td>{g.priority ?? 0}</td><td>{admin && <Button kind="plain" label={`Take it away from ${scope(g.selector)}`} onClick={() => end('It is taken away.', `/policy-groups/${g.id}`, groups.reload)}>Take away</Button>}</td></tr>)}</tbody>
          </table></div>
        )}
      </Card>
      <Card title="Budgets">
        {(budgets.value?.items ?? []).length === 0 ? <p class="muted">Nothing limits how many are stopped or started at once.</p> : (
          <ul class="history">{budgets.value!.items.map((b) => <li key={b.name}><span><strong>{b.name}</strong> <span class={b.state.free ? 'muted' : 'bad'}>{b.state.free ? 'free' : 'spent'}</span></span><span class="muted small">{b.state.sentence}</span></li>)}</ul>
        )}
      </Card>
      {editing && <Edit was={editing === 'new' ? null : editing} onClose={() => { setEditing(null); all.reload() }} />}
      {applying && <Apply what="policy" name={applying.name} text={says(applying)} onClose={() => { setApplying(null); groups.reload() }} />}
      {excepting && <Except policies={all.value?.items ?? []} onClose={() => { setExcepting(false); overrides.reload() }} />}
    </>
  )
}

/** A dialog with a form: it says what is wrong and stays until it is right. */
export function Form(p: { title: string; submit: string; onClose: () => void; send: (f: FormData) => Promise<string>; children: ComponentChildren }) {
  const [problem, setProblem] = useState<Problem | null>(null)
  const [busy, setBusy] = useState(false)
  const send = async (e: SubmitEvent) => {
    e.preventDefault()
    if (busy) return
    setBusy(true)
    setProblem(null)
    try {
      const done = await p.send(new FormData(e.currentTarget as HTMLFormElement))
      await attempt(done, async () => {})
      p.onClose()
    } catch (err) {
      setProblem(err instanceof Problem ? err : new Problem(0, '', err instanceof Error ? err.message : String(err)))
    } finally {
      setBusy(false)
    }
  }
  return (
    <Dialog title={p.title} onClose={p.onClose}>
      <form class="stack" onSubmit={send}>
        {p.children}
        {problem && <Fault problem={problem} what="Nothing is changed." />}
        <div class="actions"><button type="button" onClick={p.onClose}>Cancel</button><button type="submit" class="primary" aria-disabled={busy}>{p.submit}</button></div>
      </form>
    </Dialog>
  )
}

const text = (f: FormData, name: string) => String(f.get(name) ?? '').trim()

function Edit(p: { was: Policy | null; onClose: () => void }) {
  const { was } = p
  const send = async (f: FormData) => {
    const name = was?.name ?? text(f, 'name')
    const { shipped: _, updated_at: __, updated_by: ___, ...kept } = was ?? { name }
    const body: Record<string, unknown> = { ...kept, name, description: text(f, 'description') }
    delete body.schedule_since
    for (const k of ['idle_timeout_minutes', 'warn_before_minutes', 'snooze_minutes']) {
      if (text(f, k) === '') delete body[k]
      else body[k] = Number(text(f, k))
    }
    for (const k of ['pause_action', 'schedule']) {
      if (text(f, k) === '') delete body[k]
      else body[k] = text(f, k)
    }
    if (f.get('shadow')) body.shadow = true
    else delete body.shadow
    await ask('PUT', `/policies/${encodeURIComponent(name)}`, body)
    return `${name} holds.`
  }
  const number = (label: string, name: keyof PolicyValues) => <><label for={`p-${name}`}>{label}</label><input id={`p-${name}`} name={name} type="number" min={0} value={was?.[name] as number | undefined} /></>
  return (
    <Form title={was ? `Edit ${was.name}` : 'New policy'} submit="Save" onClose={p.onClose} send={send}>
      {!was && <><label for="p-name">Name</label><input id="p-name" name="name" required maxLength={64} /></>}
      <label for="p-description">Description</label><input id="p-description" name="description" maxLength={1024} value={was?.description} />
      <p class="muted small">What is left empty is not said: the next weaker rule then holds.</p>
      {number('Idle after, minutes', 'idle_timeout_minutes')}
      {number('Warn before, minutes', 'warn_before_minutes')}
      {number('Protection after a resume, minutes', 'snooze_minutes')}
      <label for="p-action">Action</label>
      <select id="p-action" name="pause_action" value={was?.pause_action ?? ''}><option value="">not said</option><option value="stop">stop</option><option value="hibernate">hibernate</option><option value="auto">hibernate when it pays</option></select>
      <label for="p-schedule">Schedule</label><input id="p-schedule" name="schedule" maxLength={64} value={was?.schedule} />
      <label class="check"><input type="checkbox" name="shadow" checked={was?.shadow} /> Shadow: record what it would do, and do nothing</label>
    </Form>
  )
}

export function Apply(p: { what: 'policy' | 'schedule'; name: string; text: string; onClose: () => void }) {
  const send = async (f: FormData) => {
    const path = p.what === 'policy' ? '/policies/' : '/schedules/'
    const workers = text(f, 'workers')
    const chosen = selector(await workersOf(workers), text(f, 'tags'), text(f, 'region'), !!f.get('all'))
    const body = { ...chosen, ...(text(f, 'priority') ? { priority: Number(text(f, 'priority')) } : {}) }
    await ask('POST', `${path}${encodeURIComponent(p.name)}/apply`, body)
    return `${p.name} holds for ${chosen.all ? 'the whole fleet' : scope({ ...chosen, worker_ids: workers ? [workers] : undefined })}.`
  }
  return (
    <Form title={`Apply ${p.name}`} submit="Apply" onClose={p.onClose} send={send}>
      <p>{p.name}: {p.text}.</p>
      <Whom id="a" what="The whole fleet: every worker, those that come later too" />
      <label for="a-priority">Priority among groups</label><input id="a-priority" name="priority" type="number" />
      <p class="muted small">Workers by name get it themselves; of tags and a region it holds for all that share them, now and later.</p>
    </Form>
  )
}

/** For whom something shall hold; nothing of it is nobody. */
function Whom(p: { id: string; what: string }) {
  const all = useResource<List<{ id: string; name: string }>>('/workers?limit=1000')
  return (
    <>
      <label for={`${p.id}-workers`}>Workers, by name</label><input id={`${p.id}-workers`} name="workers" list={`${p.id}-names`} autocomplete="off" />
      <datalist id={`${p.id}-names`}>{(all.value?.items ?? []).map((w) => <option key={w.id} value={w.name} />)}</datalist>
      <label for={`${p.id}-tags`}>Or all with tags, such as team=ml, env=lab</label><input id={`${p.id}-tags`} name="tags" />
      <label for={`${p.id}-region`}>Or all in a region</label><input id={`${p.id}-region`} name="region" maxLength={32} />
      <label class="check"><input type="checkbox" name="all" id={`${p.id}-all`} /> {p.what}</label>
    </>
  )
}

/** Makes an exception with an end, for the worker that is given or for those that are named. */
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
    return `The exception holds for ${whom(value)}.`
  }
  return (
    <Form title={p.worker ? `Make an exception for ${p.worker.name}` : 'Make an exception'} submit="Make it" onClose={p.onClose} send={send}>
      <label for="o-kind">What</label>
      <select id="o-kind" value={kind} onChange={(e) => setKind(e.currentTarget.value)}>
        <option value="keep">keep running</option>
        <option value="skip">skip the schedule</option>
        <option value="freeze">freeze: neither stop nor start automatically</option>
        <option value="policy">use another policy</option>
      </select>
      {kind === 'policy' && <><label for="o-policy">Policy</label><select id="o-policy" name="policy">{p.policies.map((x) => <option key={x.name}>{x.name}</option>)}</select></>}
      {!p.worker && <Whom id="o" what="The whole fleet: every worker, those that come meanwhile too" />}
      <label for="o-from">From; empty is now</label><input id="o-from" name="from" type="datetime-local" />
      <label for="o-until">Until{byDay && '; empty is not today: the end of today'}</label><input id="o-until" name="until" type="datetime-local" required={!byDay} />
      <label for="o-reason">Reason</label><input id="o-reason" name="reason" maxLength={256} />
    </Form>
  )
}

