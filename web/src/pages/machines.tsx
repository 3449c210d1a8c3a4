// Agents with their signals, and one agent with its explanation and history.

import { AgentWhy, Block, Entry, List, Machine, Reading } from '../api'
import type { PageProps } from '../router'
import { useResource } from '../resource'
import { go } from '../router'
import { local, minutes } from '../time'
import { Card, Empty, Fault, Loading, Time, words } from '../parts/ui'
import { Answer, Codes, Grounds, moment, pathAt, Then } from '../parts/account'
import { LookBack, TimelineCard } from '../parts/timeline'

/** server is the one the agent reports to. The report is missing if that is another server. */
interface Agent extends Machine { worker_id?: string; version?: string; server?: string; outdated?: boolean; stale?: boolean }

interface AgentReport {
  readings?: Reading[]
  idle_minutes?: number
  pause_holder?: string
  holds?: Block[]
  alarms?: { code: string; sentence: string }[]
  action?: { action: string; reason: string; phase: string }
}

/** A summary of all agents: which server receives them, and which need attention. */
function together(list: Agent[]): string {
  const heard = new Map<string, number>()
  for (const m of list) if (m.server) heard.set(m.server, (heard.get(m.server) ?? 0) + 1)
  const count = (n: number, one: string, many: string) => n === 0 ? [] : [n === 1 ? `1 ${one}` : `${n} ${many}`]
  return [
    ...(heard.size > 1 ? [[...heard].sort().map(([server, n]) => `${n} report to server ${server}`).join(', ')] : []),
    ...count(list.filter((m) => m.stale).length, 'has stopped reporting', 'have stopped reporting'),
    ...count(list.filter((m) => m.outdated).length, 'runs an older version than its server', 'run an older version than their server'),
  ].map((s) => ` ${s.charAt(0).toUpperCase()}${s.slice(1)}.`).join('')
}

const agentAt = (name: string) => `/agents/${encodeURIComponent(name)}`

export function Agents(p: PageProps) {
  const name = p.place.path[1]
  return name ? <One key={name} name={name} at={moment(p.place.query.get('at'))} /> : <All />
}

function One(p: { name: string; at: number | null }) {
  const path = agentAt(p.name)
  const why = useResource<AgentWhy>(path + '/why', { every: 10_000 })
  const y = why.value
  const crumb = <p class="crumb"><a href="/agents">Agents</a></p>
  if (why.problem?.status === 404) return <>{crumb}<h1>Not found</h1><Empty title={`Agent ${p.name} not found`}><a href="/agents">View all agents</a></Empty></>
  const pick = (at: number) => go(pathAt(at), p.at !== null)
  const mine = (e: Entry) => y?.worker_id !== undefined && e.worker_id === y.worker_id
  return (
    <>
      {crumb}
      <h1>{p.name}</h1>
      <Answer why={why} />
      {y?.readings === 'unknown' && y.unheard && <p class="fault" role="status">Readings: unknown. {y.unheard}</p>}
      {y?.worker_id && <p><a href={`/workers/${encodeURIComponent(y.worker_id)}`}>View worker</a></p>}
      <TimelineCard path={path} mine={mine} picked={p.at} onPick={pick} />
      <LookBack onPick={pick} />
      {p.at !== null && <Then path={path + '/why'} at={p.at} onEnd={() => go(location.pathname)} />}
      {y && <Grounds y={y} now title="Why" aside={<span class="muted small">{y.readings === 'live' ? <>reported <Time at={y.at} /></> : 'no live readings'}</span>} />}
    </>
  )
}

function All() {
  const all = useResource<List<Agent>>('/agents?limit=1000', { every: 10_000 })
  const several = new Set((all.value?.items ?? []).map((m) => m.server)).size > 1
  return (
    <>
      <h1>Agents</h1>
      <p class="headline">Machines that run lull agent and report to this server.{together(all.value?.items ?? [])}</p>
      {all.problem && <Fault problem={all.problem} retry={all.reload} />}
      {!all.value ? !all.problem && <Loading what="the agents" /> : all.value.items.length === 0 ? (
        <Empty title="No agents yet">On a machine, run <code>lull agent run</code> with <code>--server</code> and an agent token.</Empty>
      ) : all.value.items.map((m) => {
        const r = (m.report ?? {}) as AgentReport
        return (
          <Card key={m.name} title={m.name} aside={<span class={m.stale ? 'bad' : 'muted'}>{m.stale ? 'Stopped reporting: last report ' : 'reported '}<Time at={m.reported_at} />{several && m.server && ` to server ${m.server}`}</span>}>
            <p>
              {!m.report && m.server && <>Reports to server {m.server}, which has its signals. </>}
              {m.stale ? 'Its current state is unknown. ' : r.idle_minutes !== undefined && <>Idle for {minutes(r.idle_minutes)}. </>}
              {r.pause_holder && <span class="muted">{r.pause_holder === 'agent' ? 'The agent decides when to pause. ' : 'The controller decides when to pause. '}</span>}
              <a href={agentAt(m.name)}>Explanation and history</a>
              {m.worker_id && <>, <a href={`/workers/${encodeURIComponent(m.worker_id)}`}>worker</a></>}.
              {m.version && <span class={m.outdated ? 'bad' : 'muted'}> Version {m.version}{m.outdated && ', older than its server'}.</span>}
            </p>
            {(r.alarms ?? []).map((a) => <p key={a.code} class="fault">{a.sentence}</p>)}
            {r.action && <p>{words(r.action.action)}: {words(r.action.phase)} <span class="muted">({words(r.action.reason)})</span></p>}
            <Readings list={r.readings ?? []} name={m.name} />
            {(r.holds ?? []).length > 0 && <ul class="blocks">{r.holds!.map((b, i) => <li key={i}>{local(b.sentence, Date.now())}</li>)}</ul>}
            <Codes list={r.holds ?? []} />
          </Card>
        )
      })}
    </>
  )
}

function Readings(p: { list: Reading[]; name: string }) {
  if (p.list.length === 0) return null
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={`Signals of ${p.name}`}>
      <table>
        <thead><tr><th scope="col">Signal</th><th scope="col">State</th><th scope="col">Value</th><th scope="col">Threshold</th></tr></thead>
        <tbody>{p.list.map((r) => <tr key={r.signal}><th scope="row">{r.signal}</th><td><span class={`state ${r.state}`}>{r.state}</span> {r.detail && <span class="muted small">{r.detail}</span>}</td><td>{r.unit ? `${Math.round(r.value * 100) / 100} ${r.unit}` : '–'}</td><td>{r.unit ? `${r.threshold} ${r.unit}` : '–'}</td></tr>)}</tbody>
      </table>
    </div>
  )
}
