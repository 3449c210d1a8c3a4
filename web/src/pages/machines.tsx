// Machines that watch themselves: agents with their signals, and one of them
// with why it is as it is, now and at a past time.

import { AgentWhy, Block, Entry, List, Machine, Reading } from '../api'
import type { PageProps } from '../router'
import { useResource } from '../resource'
import { go } from '../router'
import { local, minutes } from '../time'
import { Card, Empty, Fault, Loading, Time, words } from '../parts/ui'
import { Answer, Codes, Grounds, moment, pathAt, Then } from '../parts/account'
import { LookBack, TimelineCard } from '../parts/timeline'

/** server is the one that hears it; where that is another than the one asked, there is no report. */
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
    ...(heard.size > 1 ? [[...heard].sort().map(([server, n]) => `server ${server} hears ${n}`).join(', ')] : []),
    ...count(list.filter((m) => m.stale).length, 'is not heard of', 'are not heard of'),
    ...count(list.filter((m) => m.outdated).length, 'is older than its server', 'are older than their server'),
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
  if (why.problem?.status === 404) return <>{crumb}<h1>Not found</h1><Empty title={`There is no agent ${p.name}.`}><a href="/agents">See the agents</a></Empty></>
  const pick = (at: number) => go(pathAt(at), p.at !== null)
  const mine = (e: Entry) => y?.worker_id !== undefined && e.worker_id === y.worker_id
  return (
    <>
      {crumb}
      <h1>{p.name}</h1>
      <Answer why={why} />
      {y?.readings === 'unknown' && y.unheard && <p class="fault" role="status">Readings: unknown. {y.unheard}</p>}
      {y?.worker_id && <p><a href={`/workers/${encodeURIComponent(y.worker_id)}`}>Its worker</a></p>}
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
      <p class="headline">Machines that watch themselves and report here.{together(all.value?.items ?? [])}</p>
      {all.problem && <Fault problem={all.problem} retry={all.reload} />}
      {!all.value ? !all.problem && <Loading what="the agents" /> : all.value.items.length === 0 ? (
        <Empty title="No agent has reported yet.">Run <code>lull agent run</code> with <code>--server</code> and a token of the role agent on a machine.</Empty>
      ) : all.value.items.map((m) => {
        const r = (m.report ?? {}) as AgentReport
        return (
          <Card key={m.name} title={m.name} aside={<span class={m.stale ? 'bad' : 'muted'}>{m.stale ? 'Not heard of: last report ' : 'reported '}<Time at={m.reported_at} />{several && m.server && ` to server ${m.server}`}</span>}>
            <p>
              {!m.report && m.server && <>Server {m.server} hears it; its signals are shown there. </>}
              {m.stale ? 'What it sees now is not known. ' : r.idle_minutes !== undefined && <>Idle for {minutes(r.idle_minutes)}. </>}
              {r.pause_holder && <span class="muted">{r.pause_holder === 'agent' ? 'It decides about itself. ' : 'The controller decides about it. '}</span>}
              <a href={agentAt(m.name)}>Why, and its past</a>
              {m.worker_id && <>, <a href={`/workers/${encodeURIComponent(m.worker_id)}`}>its worker</a></>}.
              {m.version && <span class={m.outdated ? 'bad' : 'muted'}> Version {m.version}{m.outdated && ', older than the server that hears it'}.</span>}
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
        <thead><tr><th scope="col">Signal</th><th scope="col">Says</th><th scope="col">Value</th><th scope="col">Counts from</th></tr></thead>
        <tbody>{p.list.map((r) => <tr key={r.signal}><th scope="row">{r.signal}</th><td><span class={`state ${r.state}`}>{r.state}</span> {r.detail && <span class="muted small">{r.detail}</span>}</td><td>{r.unit ? `${Math.round(r.value * 100) / 100} ${r.unit}` : '–'}</td><td>{r.unit ? `${r.threshold} ${r.unit}` : '–'}</td></tr>)}</tbody>
      </table>
    </div>
  )
}
