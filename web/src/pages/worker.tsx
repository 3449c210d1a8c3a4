// One worker: its explanation, activity, lifecycle and commands.

import { useState } from 'preact/hooks'
import { action, doer, status } from '../actions'
import { ask, Entry, IdleStatus, List, Metrics, Standing, Why, Worker } from '../api'
import type { PageProps } from '../router'
import { Resource, useResource } from '../resource'
import { go, useTitle } from '../router'
import { Origin, overrideKinds, Policy, says, WorkerPolicy } from '../rules'
import { ago, clock, exact, local, minutes, span, useNow } from '../time'
import { attempt, Badge, Button, Card, Empty, Fault, Loading, standings, Time, words } from '../parts/ui'
import { Answer, Grounds, moment, pathAt, Then } from '../parts/account'
import { Form } from '../parts/form'
import { Menu, MenuItems } from '../parts/menu'
import { Except } from '../parts/rules'
import { LookBack, TimelineCard } from '../parts/timeline'
import { UseCharts } from '../parts/usecharts'
import { awsConsole, DialogKind, WorkerDialog } from '../parts/workerdialogs'

export function WorkerPage(p: PageProps) {
  const id = p.place.path[1] ?? ''
  return id ? <One key={id} id={id} operator={p.operator} admin={p.role === 'admin'} at={moment(p.place.query.get('at'))} /> : <Empty title="No worker selected"><a href="/">View the fleet</a></Empty>
}

function One(p: { id: string; operator: boolean; admin: boolean; at: number | null }) {
  const path = `/workers/${encodeURIComponent(p.id)}`
  const mine = (e: Entry) => e.worker_id === p.id || e.action.includes('halt') || e.action.includes('settings')
  const worker = useResource<Worker>(path, { on: mine, every: 30_000 })
  const why = useResource<Why>(path + '/why', { on: mine, every: 5_000 })
  useTitle(worker.value?.name)
  const metrics = useResource<Metrics>(path + '/metrics', { every: 30_000 })
  const w = worker.value
  if (!w) {
    if (!worker.problem) return <Loading what="the worker" />
    return worker.problem.status === 404
      ? <><h1>Not found</h1><Empty title={`Worker ${p.id} not found`}><a href="/">View the fleet</a></Empty></>
      : <><h1>Worker</h1><Fault problem={worker.problem} retry={worker.reload} /></>
  }
  const st = why.value?.idle_status
  const pick = (at: number) => go(pathAt(at), p.at !== null)
  return (
    <>
      <p class="crumb"><a href="/">Fleet</a> / {w.aws_region}</p>
      <h1>{w.name} {why.value?.standing && <Badge standing={why.value.standing} />}</h1>
      {worker.problem && <Fault problem={worker.problem} retry={worker.reload} what="Cannot refresh. This may be out of date." />}
      <Answer why={why} />
      {p.operator ? <Commands admin={p.admin} w={w} worker={worker} path={path} reload={() => { worker.reload(); why.reload() }} />
        : <p class="muted">You have view-only access. Operators can pause, resume and snooze.</p>}
      <TimelineCard path={path} mine={mine} picked={p.at} onPick={pick} more={(t) => <UseCharts t={t} />}>
        <LookBack onPick={pick} />
        {p.at !== null && <Then path={path + '/why'} at={p.at} onEnd={() => go(location.pathname)} />}
      </TimelineCard>
      <div class="columns">
        <div>
          <Lifecycle w={w} st={st} standing={why.value?.standing} />
          <WhyPanel why={why} />
        </div>
        <div>
          <Facts w={w} metrics={metrics.value} />
          <Rules w={w} path={path} mine={mine} operator={p.operator} admin={p.admin} reload={() => { worker.reload(); why.reload() }} />
          <History why={why} id={p.id} />
        </div>
      </div>
    </>
  )
}

function Commands(p: { admin: boolean; w: Worker; worker: Resource<Worker>; path: string; reload: () => void }) {
  const [dialog, setDialog] = useState<DialogKind | ''>('')
  const { w } = p
  const now = useNow()
  const act = async (verb: string, done: string, body?: unknown) => {
    await attempt(done, async () => {
      const a = await ask<Worker>('POST', `${p.path}/${verb}`, body)
      if (a.value?.id) p.worker.put(a.value, a.revision)
    })
    p.reload()
  }
  const running = w.status === 'RUNNING', stopped = w.status === 'STOPPED'
  const gone = w.status === 'TERMINATED' || w.status === 'TERMINATING'
  const off = !w.is_idle_detection_enabled
  const snoozed = w.snoozed_until !== null && new Date(w.snoozed_until).getTime() > now
  const more: MenuItems = [
    { label: 'Edit…', run: () => setDialog('edit') },
    { label: 'Expiry…', run: () => setDialog('expiry') },
    { label: 'CML license…', run: () => setDialog('license') },
    { label: off ? 'Turn on idle detection' : 'Turn off idle detection', run: () => void act(off ? 'idle-detection/enable' : 'idle-detection/disable', off ? `Idle detection is on for ${w.name}.` : `Idle detection is off for ${w.name}.`) },
    ...(w.armed ? [{ label: 'Disarm (dry run)', run: () => void act('disarm', `${w.name} is in dry-run mode.`) }] : []),
    ...(p.admin ? [null, { label: 'Terminate…', danger: true, run: () => setDialog('terminate') }] : []),
  ]
  if (gone) return null
  return (
    <div class="actions commands" role="group" aria-label="Commands">
      {!w.armed && p.admin && <Button kind="primary" onClick={() => act('arm', `${w.name} is armed.`)}>Arm</Button>}
      {(stopped || w.status === 'STOPPING') && <Button kind="primary" onClick={() => act('resume', `${w.name} is resuming.`)}>Resume</Button>}
      {w.status === 'DRAINING' && <Button kind="primary" onClick={() => act('cancel-drain', `Canceled the drain of ${w.name}.`)}>Cancel drain</Button>}
      {w.status === 'FAILED' && <Button kind="primary" onClick={() => act('retry', `Retrying ${w.name}.`)}>Retry</Button>}
      {running && <Button onClick={() => setDialog('pause')}>Pause</Button>}
      {running && <Button onClick={() => setDialog('snooze')}>{snoozed ? 'Change snooze' : 'Snooze'}</Button>}
      {snoozed && <Button onClick={() => act('snooze', `Ended the snooze of ${w.name}.`, {})}>End snooze</Button>}
      {running && <Button onClick={() => setDialog('drain')}>Drain</Button>}
      {running && <Button onClick={() => act('detect-idle', `Checked ${w.name}.`)}>Check now</Button>}
      <Menu label="More commands" items={more}>More</Menu>
      <Consoles w={w} />
      {dialog && <WorkerDialog kind={dialog} id={w.id} admin={p.admin} onClose={() => { setDialog(''); p.reload() }} />}
    </div>
  )
}

/** Links to where the worker itself is. */
function Consoles(p: { w: Worker }) {
  const { w } = p
  return (
    <span class="consoles">
      {w.https_endpoint && <a href={w.https_endpoint} target="_blank" rel="noreferrer noopener">CML console ↗</a>}
      {w.ec2_instance_id && <a href={awsConsole(w.aws_region, w.ec2_instance_id)} target="_blank" rel="noreferrer noopener">AWS console ↗</a>}
    </span>
  )
}

/** The section "Activity & Lifecycle" of the worker. */
function Lifecycle(p: { w: Worker; st: IdleStatus | undefined; standing: Standing | undefined }) {
  const { w, st } = p
  const now = useNow()
  const events = w.recent_activity_events ?? []
  const seconds = st?.target_pause_at ? (new Date(st.target_pause_at).getTime() - now) / 1000 : null
  const protectedUntil = st?.snooze_until && new Date(st.snooze_until).getTime() > now ? st.snooze_until : null
  return (
    <Card title="Activity & Lifecycle">
      <dl class="facts two">
        <div><dt>State</dt><dd>{stateText(w, st, p.standing)}</dd></div>
        {w.status_reason && <div><dt>Reason</dt><dd>{local(w.status_reason, now)}</dd></div>}
        <div><dt>Last activity</dt><dd><Time at={st?.last_activity_at ?? w.last_activity_at} none="none yet" /></dd></div>
        <div><dt>Auto-pause</dt><dd>{pauseText(w, st, seconds, now)}</dd></div>
        {w.ttl_deadline && w.status !== 'TERMINATED' && <div><dt>Expiry</dt><dd><strong>{w.ttl_action === 'terminate' ? 'terminated' : 'stopped'}</strong> at <Time at={w.ttl_deadline} as="clock" />, even if in use{!w.armed && ' (dry run: only recorded)'}</dd></div>}
        <div><dt>Next check</dt><dd>{w.status === 'RUNNING' && st?.next_idle_check_at ? <Time at={st.next_idle_check_at} /> : '–'}</dd></div>
        <div><dt>Snooze protection</dt><dd>{protectedUntil ? <>until <Time at={protectedUntil} as="clock" /> ({span((new Date(protectedUntil).getTime() - now) / 1000)} left){w.snoozed_until === protectedUntil && w.snoozed_by && <>, by {w.snoozed_by}</>}</> : 'none'}</dd></div>
        <div><dt>Idle detection</dt><dd>{w.is_idle_detection_enabled ? (st && !st.auto_pause_enabled ? 'on, but automatic pauses are off' : 'on') : 'off'}{!w.armed && ', dry run: decisions are only recorded'}</dd></div>
      </dl>
      {w.status === 'RUNNING' && st && p.standing !== 'checking' && <Progress st={st} seconds={seconds} />}
      <dl class="facts two">
        <div><dt>Last paused</dt><dd><Time at={w.last_paused_at} />{w.last_paused_at && <span class="muted"> {words(w.pause_reason)}, by {doer(w.last_paused_by)}</span>}</dd></div>
        <div><dt>Last resumed</dt><dd><Time at={w.last_resumed_at} />{w.last_resumed_at && w.last_resumed_by && <span class="muted"> by {doer(w.last_resumed_by)}</span>}</dd></div>
      </dl>
      <table class="counters">
        <caption class="hidden">Pause and resume counts</caption>
        <thead><tr><td /><th scope="col">Automatic</th><th scope="col">Manual</th><th scope="col">Outside lull</th></tr></thead>
        <tbody>
          <tr><th scope="row">Paused</th><td>{w.auto_pause_count}</td><td>{w.manual_pause_count}</td><td>{w.external_pause_count}</td></tr>
          <tr><th scope="row">Resumed</th><td>{w.auto_resume_count}</td><td>{w.manual_resume_count}</td><td>{w.external_resume_count}</td></tr>
        </tbody>
      </table>
      <h3 id="recent">Recent activity</h3>
      {events.length === 0 ? <p class="muted">No CML activity yet.</p> : (
        <div class="scroll" tabIndex={0} role="region" aria-labelledby="recent">
          <table>
            <thead><tr><th scope="col">When</th><th scope="col">Category</th><th scope="col">Details</th></tr></thead>
            <tbody>{events.map((e, i) => <tr key={i}><td title={exact(e.timestamp)}>{ago(e.timestamp, now)}</td><td>{words(e.category)}</td><td class="muted" title={typeof e.data === 'object' ? JSON.stringify(e.data) : undefined}>{details(e.data)}</td></tr>)}</tbody>
          </table>
        </div>
      )}
    </Card>
  )
}

/** Describes the state with the label of its badge. */
function stateText(w: Worker, st: IdleStatus | undefined, standing: Standing | undefined): string {
  if (w.status !== 'RUNNING') return status(w.status).replace(/^./, (c) => c.toUpperCase())
  if (standing === 'checking') return 'Checking activity'
  if (!st || st.readings_unknown || !standing) return 'No data'
  return `${standings[standing].label}: ${idleOf(st)}`
}

/** How much of the idle timeout has passed. */
const idleOf = (st: IdleStatus) => `${minutes(st.idle_minutes)} of ${minutes(st.timeout_minutes)} idle timeout`

function pauseText(w: Worker, st: IdleStatus | undefined, seconds: number | null, now: number): string {
  if (w.intent) return `requested by ${doer(w.intent.by)}`
  if (w.status !== 'RUNNING') return '–'
  if (!st) return 'unknown'
  if (seconds === null) return st.blocks?.some((b) => b.code === 'signal_active' || b.code === 'recent_activity') ? 'not while in use' : 'blocked'
  if (seconds > 0 && st.blocks?.some((b) => b.code === 'budget')) return `not before ${clock(st.target_pause_at!, now)}`
  return seconds > 0 ? `in ${span(seconds)}, at ${clock(st.target_pause_at!, now)}` : 'due'
}

function Progress(p: { st: IdleStatus; seconds: number | null }) {
  const { st } = p
  const share = p.seconds !== null && p.seconds <= 0 ? 1 : Math.min(1, st.idle_minutes / Math.max(st.timeout_minutes, 0.01))
  const text = idleOf(st)
  return (
    <div class="progress">
      <div role="progressbar" aria-label="Idle time" aria-valuemin={0} aria-valuemax={100} aria-valuenow={Math.round(share * 100)} aria-valuetext={text}><div style={{ width: `${share * 100}%` }} /></div>
      <span class="muted small">{text}</span>
    </div>
  )
}

/** Shortens a UUID. */
const short = (v: string) => v.replace(/^([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/, '$1…')

/** Formats the data of an event in one line. */
export function details(data: unknown): string {
  if (data === null || data === undefined) return ''
  if (typeof data !== 'object') return String(data)
  return Object.entries(data as Record<string, unknown>).filter(([, v]) => v !== null && v !== '').map(([k, v]) => `${words(k)}: ${typeof v === 'object' ? JSON.stringify(v) : short(String(v))}`).join(', ')
}

function WhyPanel(p: { why: Resource<Why> }) {
  const y = p.why.value
  if (!y) return null
  return <Grounds y={y} now title="Why" aside={<span class="muted small">{y.readings === 'unknown' ? 'no live readings' : <>checked <Time at={y.idle_status.checked_at} /></>}</span>} />
}

function Facts(p: { w: Worker; metrics: Metrics | undefined }) {
  const { w, metrics: m } = p
  const percent = (v: number | null | undefined, name: string) => (v === null || v === undefined ? <span class="muted" title={m?.samples?.[name]?.error}>unknown</span> : `${Math.round(v)} %`)
  const tags = Object.entries(w.tags ?? {})
  return (
    <Card title="Machine">
      <dl class="facts">
        <div><dt>Instance</dt><dd>{w.ec2_instance_id || '–'} {w.instance_type && <span class="muted">{w.instance_type}</span>}</dd></div>
        <div><dt>Address</dt><dd>{w.public_ip || w.private_ip || '–'}</dd></div>
        <div><dt>Owner</dt><dd>{w.owner || '–'}{(w.contacts ?? []).length > 0 && <div class="muted small">receives warnings: {w.contacts!.join(', ')}</div>}</dd></div>
        <div><dt>Running since</dt><dd><Time at={w.running_since} none="–" /></dd></div>
        <div><dt>CPU, memory, disk</dt><dd>{percent(m?.cpu_utilization, 'cpu_utilization')}, {percent(m?.memory_utilization, 'memory_utilization')}, {percent(m?.disk_utilization, 'disk_utilization')}</dd></div>
        <div><dt>Labs, nodes</dt><dd>{m?.labs_count ?? <span class="muted">unknown</span>}, {m?.nodes_count ?? <span class="muted">unknown</span>}</dd></div>
        <div><dt>CML</dt><dd>{w.cml_version || '–'}, license {words(w.license.status) || 'unknown'}{w.license.last_error && <span class="bad"> {w.license.last_error}</span>}</dd></div>
        <div><dt>Tags</dt><dd>{tags.length === 0 ? '–' : tags.map(([k, v]) => <span key={k} class="tag">{k}={v}</span>)}</dd></div>
      </dl>
    </Card>
  )
}

/** The effective policy, the source of each value, and how to change it. */
function Rules(p: { w: Worker; path: string; mine: (e: Entry) => boolean; operator: boolean; admin: boolean; reload: () => void }) {
  const [dialog, setDialog] = useState<'' | 'policy' | 'except'>('')
  const r = useResource<WorkerPolicy>(p.path + '/policy', { on: (e) => p.mine(e) || /^(policy|budget|schedule|override)_/.test(e.action), every: 60_000 })
  const policies = useResource<List<Policy>>(dialog ? '/policies?limit=1000' : null)
  const v = r.value
  if (!v) return r.problem ? <Card title="Rules"><Fault problem={r.problem} retry={r.reload} /></Card> : null
  const from = (o: Origin | undefined) => o && <span class="muted small"> {o.layer === 'worker' ? 'set on this worker' : [words(o.layer), o.name].filter(Boolean).join(' ')}</span>
  const done = () => { setDialog(''); r.reload(); p.reload() }
  const end = (id: string) => attempt('Ended the exception.', () => ask('DELETE', `/overrides/${id}`)).then(done)
  const alone = (o: WorkerPolicy['overrides'] extends (infer O)[] | null ? O : never) => o.selector.worker_ids?.length === 1 && o.selector.worker_ids[0] === p.w.id
  return (
    <Card title="Rules" aside={<a href="/policies">All policies</a>}>
      {(v.faults ?? []).map((f) => <p key={f} class="fault">{f}</p>)}
      <dl class="facts">
        <div><dt>Policy</dt><dd>{v.name === 'global' ? 'fleet settings' : v.name}{p.w.policy && <span class="muted small"> set on this worker</span>}</dd></div>
        <div><dt>Idle timeout</dt><dd>{minutes(v.idle_timeout_seconds / 60)}{from(v.from.idle_timeout)}</dd></div>
        <div><dt>Pause action</dt><dd>{v.pause_action}, warning {minutes(v.warn_before_seconds / 60)} before{from(v.from.pause_action)}</dd></div>
        <div><dt>Activity sources</dt><dd>{(v.activity_sources ?? []).join(', ')}{from(v.from.activity_sources)}</dd></div>
        <div><dt>Schedule</dt><dd>{v.standing ? <>{v.standing.schedule}, {v.standing.open ? 'open' : 'closed'} now{v.standing.next && <>, {v.standing.next.opens ? 'opens' : 'closes'} <Time at={v.standing.next.at} /></>}</> : 'none'}</dd></div>
        {(v.overrides ?? []).map((o) => (
          <div key={o.id}><dt>Exception</dt><dd>{overrideKinds(o)}, until <Time at={o.until} as="clock" /> by {o.by}{o.reason && `: ${o.reason}`}
            {p.operator && alone(o) ? <> <Button kind="plain" label={`End the exception for ${p.w.name}`} onClick={() => end(o.id)}>End</Button></> : !alone(o) && <span class="muted small"> also applies to other workers</span>}</dd></div>
        ))}
        {(v.budgets ?? []).filter((b) => !b.free).map((b) => <div key={b.budget}><dt>Budget</dt><dd>{b.sentence}</dd></div>)}
      </dl>
      {p.operator && (
        <div class="actions">
          <Button onClick={() => setDialog('except')}>Add exception</Button>
          {p.admin && <Button onClick={() => setDialog('policy')}>Change policy</Button>}
        </div>
      )}
      {dialog === 'except' && policies.value && <Except worker={p.w} policies={policies.value.items} onClose={done} />}
      {dialog === 'policy' && policies.value && <Choose w={p.w} holds={v.name} policies={policies.value.items} onClose={done} />}
      {dialog && policies.problem && <Fault problem={policies.problem} retry={policies.reload} />}
    </Card>
  )
}

/** Sets or clears the policy of this worker. */
function Choose(p: { w: Worker; holds: string; policies: Policy[]; onClose: () => void }) {
  const [name, setName] = useState(p.w.policy ?? '')
  const chosen = p.policies.find((x) => x.name === name)
  const send = async () => {
    const at = name || p.w.policy
    if (at) await ask('POST', `/policies/${encodeURIComponent(at)}/apply`, { worker_ids: [p.w.id], ...(name ? {} : { remove: true }) })
    return name ? `${name} applies to ${p.w.name}.` : `${p.w.name} inherits its policy.`
  }
  return (
    <Form title={`Policy of ${p.w.name}`} submit="Apply" onClose={p.onClose} send={send}>
      <label for="w-policy">Policy</label>
      <select id="w-policy" value={name} onChange={(e) => setName(e.currentTarget.value)}>
        <option value="">Inherit from group or fleet</option>
        {p.policies.map((x) => <option key={x.name} value={x.name}>{x.name}</option>)}
      </select>
      <p class="muted">{chosen ? `${chosen.name} ${says(chosen)}.` : 'Group and fleet rules apply.'} Applies to this worker only. <a href="/policies">Assign to several workers</a></p>
    </Form>
  )
}

function History(p: { why: Resource<Why>; id: string }) {
  const last = p.why.value?.last ?? []
  return (
    <Card title="Recent events" aside={<a href={`/audit?worker_id=${encodeURIComponent(p.id)}`}>View all</a>}>
      {last.length === 0 ? <p class="muted">No events yet.</p> : (
        <ul class="history">
          {last.map((e, i) => (
            <li key={`${e.id}-${i}`}>
              <span><strong>{action(e.action)}</strong>{e.from && e.to && e.from !== e.to && <span class="muted"> {status(e.from)} to {status(e.to)}</span>}{e.reason && <span class="muted"> {words(e.reason)}</span>}</span>
              <span class="muted small"><Time at={e.at} /> by {doer(e.by.name)}</span>
              {e.detail && <span class="muted small">{local(e.detail, Date.now())}</span>}
            </li>
          ))}
        </ul>
      )}
    </Card>
  )
}

