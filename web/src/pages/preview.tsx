// Preview: what policies would have done on recorded days.

import { useEffect, useRef, useState } from 'preact/hooks'
import { List, Problem } from '../api'
import type { PageProps } from '../router'
import { hours, Outcome, saved, simulate, Simulation } from '../evidence'
import { useResource } from '../resource'
import { Policy, Schedule } from '../rules'
import { DurationField } from '../parts/fields'
import { clock, minutes, parseMinutes, span } from '../time'
import { Empty, Fault, Loading } from '../parts/ui'

/** One policy to try: a named one, or numbers of its own. */
interface Candidate { name: string; timeout: string; snooze: string; warn: string; schedule: string; sources: string; signals: string; limits: Record<string, string> }

/** What is replayed: checks of workers by the server, or reports of agents. */
type Of = 'workers' | 'agents'

/** Signals of agents that have a value, with what it is. */
const valued: [string, string, string][] = [['cpu', 'CPU', '%'], ['network', 'Network', 'KB/min'], ['disk', 'Disk', 'KB/min'], ['gpu', 'GPU', '%']]

/** The choice that keeps the policy's value or, if it has none, what was in force. */
const asIs = 'unchanged'
const sources: [string, string][] = [['cml', 'CML only'], ['cml,agent', 'CML and agent'], ['agent', 'agent only'], ['cml,agent,cloudwatch', 'CML, agent and CloudWatch']]

const own = 'custom'

const written = (m: number | undefined) => (m === undefined ? '' : minutes(m))

/** The minutes of a duration that was typed; undefined if it is empty. */
function read(label: string, text: string): number | undefined {
  if (text.trim() === '') return undefined
  const m = parseMinutes(text)
  if (m === null) throw new Error(`${label}: invalid duration "${text}". Use a format such as 45 min or 1h 30m.`)
  return Math.round(m)
}

export function Preview(p: PageProps) {
  const all = useResource<List<Policy>>('/policies?limit=1000')
  const schedules = useResource<List<Schedule>>('/schedules?limit=1000')
  const list = (all.value?.items ?? []).filter((x) => x.idle_timeout_minutes !== undefined)
  if (!all.value) return <><h1>Preview</h1>{all.problem ? <Fault problem={all.problem} retry={all.reload} /> : <Loading what="the policies" />}</>
  return (
    <>
      <p class="crumb"><a href="/policies">Policies</a></p>
      <h1>Preview</h1>
      <p class="headline">What a policy would have done on the recorded days. A preview changes nothing.</p>
      <Trial list={list} schedules={(schedules.value?.items ?? []).map((x) => x.name)} first={p.place.query.get('policy') ?? list[0]?.name ?? own} />
    </>
  )
}

function Trial(p: { list: Policy[]; schedules: string[]; first: string }) {
  const pick = (name: string): Candidate => {
    const of = p.list.find((x) => x.name === name)
    return { name: of ? name : own, timeout: written(of?.idle_timeout_minutes ?? 60), snooze: written(of?.snooze_minutes), warn: written(of?.warn_before_minutes), schedule: asIs, sources: asIs, signals: '', limits: {} }
  }
  const [of, setOf] = useState<Of>('workers')
  const [one, setOne] = useState(pick(p.first))
  const [two, setTwo] = useState<Candidate | null>(null)
  const [days, setDays] = useState(7)
  const [share, setShare] = useState<number | null>(null)
  const [result, setResult] = useState<Simulation | null>(null)
  const [problem, setProblem] = useState<Problem | null>(null)
  const running = useRef<AbortController | null>(null)
  useEffect(() => () => running.current?.abort(), [])
  const wanted = (c: Candidate, other: Candidate | null, n: number) => {
    const named = p.list.find((x) => x.name === c.name)
    const signals = c.signals.split(/[\s,]+/).filter(Boolean), limits = Object.entries(c.limits).filter(([, v]) => v !== '')
    const what = of === 'agents' ? { ...(signals.length > 0 ? { signals } : {}), ...(limits.length > 0 ? { thresholds: Object.fromEntries(limits.map(([k, v]) => [k, Number(v)])) } : {}) }
      : { ...(c.schedule !== asIs ? { schedule: c.schedule } : {}), ...(c.sources !== asIs ? { activity_sources: c.sources.split(',') } : {}) }
    const [timeout, snooze, warn] = [read('Idle timeout', c.timeout), read('Snooze after resume', c.snooze), read('Warning before pause', c.warn)]
    if (timeout === undefined) throw new Error('Enter an idle timeout.')
    const changed = !named || timeout !== named.idle_timeout_minutes || snooze !== named.snooze_minutes || warn !== named.warn_before_minutes || Object.keys(what).length > 0
    if (!changed) return { name: c.name }
    const name = named ? `${c.name}, changed` : own
    return { name: other && n === 1 && (other.name === c.name || !named) ? `${name} (2)` : name, timeout_minutes: timeout, ...(named ? { policy: named.name } : {}), ...(snooze !== undefined ? { snooze_minutes: snooze } : {}), ...(warn !== undefined ? { warn_before_minutes: warn } : {}), ...what }
  }
  const run = async (e: Event) => {
    e.preventDefault()
    if (running.current) return
    const control = new AbortController()
    running.current = control
    setShare(0)
    setProblem(null)
    try {
      const policies = [wanted(one, two, 0), ...(two ? [wanted(two, one, 1)] : [])]
      setResult(await simulate({ of, policies, from: new Date(Date.now() - days * 86_400_000).toISOString() }, setShare, control.signal))
    } catch (err) {
      if (!control.signal.aborted) setProblem(err instanceof Problem ? err : new Problem(0, '', err instanceof Error ? err.message : String(err)))
    } finally {
      running.current = null
      setShare(null)
    }
  }
  return (
    <>
      <form class="card trial" onSubmit={run}>
        <div class="field">
          <label for="of">Replay</label>
          <select id="of" value={of} onChange={(e) => { setOf(e.currentTarget.value as Of); setResult(null) }}>
            <option value="workers">workers, from server checks</option>
            <option value="agents">machines, from agent reports</option>
          </select>
        </div>
        <Choice id="one" of={of} title="Policy" list={p.list} schedules={p.schedules} c={one} set={setOne} pick={pick} />
        {two ? <Choice id="two" of={of} title="Compare with" list={p.list} schedules={p.schedules} c={two} set={setTwo} pick={pick} onRemove={() => setTwo(null)} />
          : <p><button type="button" onClick={() => setTwo(pick(p.list.find((x) => x.name !== one.name)?.name ?? own))}>Compare with another policy</button></p>}
        <div class="actions">
          <label>Over the last{' '}
            <select value={String(days)} onChange={(e) => setDays(Number(e.currentTarget.value))}>
              {[1, 3, 7, 14, 30].map((n) => <option key={n} value={n}>{n === 1 ? 'day' : `${n} days`}</option>)}
            </select>
          </label>
          {share === null ? <button key="go" type="submit" class="primary">Preview</button> : <button key="end" type="button" onClick={() => running.current?.abort()}>Cancel</button>}
        </div>
        {share !== null && (
          <div class="progress" role="status">
            <div role="progressbar" aria-label="Replay progress" aria-valuemin={0} aria-valuemax={100} aria-valuenow={Math.round(share * 100)}><div style={{ width: `${share * 100}%` }} /></div>
            <span class="muted small">Replaying recorded days: {Math.round(share * 100)} %</span>
          </div>
        )}
      </form>
      {problem && <Fault problem={problem} what="Preview failed." />}
      {result && <Result r={result} of={of} />}
    </>
  )
}

function Choice(p: { id: string; of: Of; title: string; list: Policy[]; schedules: string[]; c: Candidate; set: (c: Candidate) => void; pick: (name: string) => Candidate; onRemove?: () => void }) {
  const { c, id } = p
  return (
    <fieldset>
      <legend>{p.title}</legend>
      <div class="field">
        <label for={`${id}-name`}>Start from</label>
        <select id={`${id}-name`} value={c.name} onChange={(e) => p.set(p.pick(e.currentTarget.value))}>
          {p.list.map((x) => <option key={x.name} value={x.name}>{x.name}</option>)}
          <option value={own}>custom values</option>
        </select>
      </div>
      {([['timeout', 'Idle timeout'], ['snooze', 'Snooze after resume'], ['warn', 'Warning before pause']] as const).map(([key, label]) => (
        <DurationField key={`${key}/${c.name}`} id={`${id}-${key}`} name={key} label={label} required={key === 'timeout'} minutes={parseMinutes(c[key]) ?? undefined} inherit="unchanged" onInput={(v) => p.set({ ...c, [key]: v })} />
      ))}
      {p.of === 'agents' ? <Limits id={id} c={c} set={p.set} /> : <>
      <div class="field">
        <label for={`${id}-schedule`}>Schedule</label>
        <select id={`${id}-schedule`} value={c.schedule} onChange={(e) => p.set({ ...c, schedule: e.currentTarget.value })}>
          <option value={asIs}>{asIs}</option>
          <option value="">none</option>
          {p.schedules.map((x) => <option key={x} value={x}>{x}</option>)}
        </select>
      </div>
      <div class="field">
        <label for={`${id}-sources`}>Signals that count</label>
        <select id={`${id}-sources`} value={c.sources} onChange={(e) => p.set({ ...c, sources: e.currentTarget.value })}>
          <option value={asIs}>{asIs}</option>
          {sources.map(([value, text]) => <option key={value} value={value}>{text}</option>)}
        </select>
      </div>
      </>}
      {p.onRemove && <button type="button" class="plain" onClick={p.onRemove}>Remove comparison</button>}
    </fieldset>
  )
}

/** Thresholds of an agent's signals, and which signals count. */
function Limits(p: { id: string; c: Candidate; set: (c: Candidate) => void }) {
  const { id, c } = p
  return (
    <>
      {valued.map(([name, label, unit]) => (
        <div key={name} class="field">
          <label for={`${id}-${name}`}>{label} threshold, {unit}</label>
          <input id={`${id}-${name}`} type="number" min={0.001} step="any" placeholder="unchanged" value={c.limits[name] ?? ''} onInput={(e) => p.set({ ...c, limits: { ...c.limits, [name]: e.currentTarget.value } })} />
        </div>
      ))}
      <div class="field">
        <label for={`${id}-signals`}>Signals that count</label>
        <input id={`${id}-signals`} placeholder="unchanged" value={c.signals} onInput={(e) => p.set({ ...c, signals: e.currentTarget.value })} aria-describedby={`${id}-signals-note`} />
        <span id={`${id}-signals-note`} class="muted small">such as cpu, gpu, users</span>
      </div>
    </>
  )
}

function Result(p: { r: Simulation; of: Of }) {
  const { r } = p
  const head = useRef<HTMLHeadingElement>(null)
  useEffect(() => head.current?.focus(), [r])
  const now = Date.now()
  const total = r.policies[0]
  const known = total ? total.running_hours + total.avoided_hours : 0
  const rows: [string, (o: Outcome) => string, string?][] = [
    ['Pauses', (o) => o.pauses.toLocaleString('en')],
    ['False stops', (o) => o.false_stops.toLocaleString('en'), `The user came back within ${r.window_minutes} minutes`],
    ['Hours avoided', (o) => hours(o.avoided_hours)],
    ['Hours running', (o) => hours(o.running_hours)],
    ['Saved', (o) => saved(o), 'Compute minus storage that is still billed'],
    ['Unknown hours', (o) => hours(o.unknown_hours), 'Not recorded, so nothing is decided'],
  ]
  if (known === 0) return <Empty title="Not enough data yet">{p.of === 'agents' ? 'A preview replays agent reports. Check again once agents have reported for a while.' : 'A preview replays the checks of lull. Check again once it has run for a while.'}</Empty>
  return (
    <section class="card" aria-labelledby="result">
      <header><h2 id="result" tabIndex={-1} ref={head}>What it would have done</h2><span class="muted small">{clock(r.from, now)} to {clock(r.to, now)}</span></header>
      <p class="answer">{recommend(r)}</p>
      <div class="scroll" tabIndex={0} role="region" aria-label="Outcome of each policy">
        <table class="outcomes">
          <thead><tr><td />{r.policies.map((o) => <th key={o.name} scope="col">{o.name}<div class="muted small">idle after {minutes(o.timeout_minutes)}{o.schedule && `, schedule ${o.schedule}`}</div></th>)}</tr></thead>
          <tbody>{rows.map(([title, show, note]) => <tr key={title}><th scope="row">{title}{note && <div class="muted small">{note}</div>}</th>{r.policies.map((o) => <td key={o.name} class={title === 'False stops' && o.false_stops > 0 ? 'bad' : ''}>{show(o)}</td>)}</tr>)}</tbody>
        </table>
      </div>
      {r.policies.map((o) => o.stops.length > 0 && (
        <details key={o.name}>
          <summary>Pauses of {o.name}{o.pauses > o.stops.length ? `, ${o.stops.length} of ${o.pauses}` : ''}</summary>
          <div class="scroll" tabIndex={0} role="region" aria-label={`Pauses of ${o.name}`}>
            <table>
              <thead><tr><th scope="col">{p.of === 'agents' ? 'Machine' : 'Worker'}</th><th scope="col">From</th><th scope="col">For</th><th scope="col">Outcome</th></tr></thead>
              <tbody>{o.stops.map((x, i) => <tr key={i}><th scope="row"><a href={`/${p.of}/${encodeURIComponent(x.object)}?at=${x.from}`}>{r.workers[x.object] ?? x.object}</a></th><td class="nowrap">{clock(x.from, now)}</td><td class="nowrap">{span((new Date(x.to).getTime() - new Date(x.from).getTime()) / 1000)}</td><td>{x.false_stop ? <span class="bad">the user came back at once (false stop)</span> : x.back ? 'the user came back' : 'until the end'}</td></tr>)}</tbody>
            </table>
          </div>
        </details>
      ))}
      {r.missing.length > 0 && <p class="muted small">Records are incomplete: {r.missing.slice(0, 3).map((m) => [m.server, m.why].filter(Boolean).join(' ')).join('; ')}.</p>}
    </section>
  )
}

function recommend(r: Simulation): string {
  const best = r.policies.find((o) => o.name === r.recommended)
  if (best) return `${best.name} saves the most without false stops: ${hours(best.avoided_hours)}${best.saved_usd !== null ? `, ${saved(best).toLowerCase()}` : ''}.`
  if (r.policies.every((o) => o.avoided_hours === 0)) return r.policies.length === 1 ? 'It would have paused nothing.' : 'Neither would have paused anything.'
  return r.policies.length === 1 ? 'It would have stopped a user who was about to continue. A longer timeout has fewer false stops.' : 'Each would have stopped a user who was about to continue. A longer timeout has fewer false stops.'
}
