// Machines that watch themselves: agents with their signals.

import { Block, List, Machine, Reading } from '../api'
import type { PageProps } from '../app'
import { useResource } from '../resource'
import { minutes } from '../time'
import { Card, Empty, Fault, Loading, Time, words } from '../ui'

interface AgentReport {
  version?: string
  readings?: Reading[]
  idle_minutes?: number
  pause_holder?: string
  holds?: Block[]
  alarms?: { code: string; sentence: string }[]
  action?: { action: string; reason: string; phase: string }
}

export function Agents(_: PageProps) {
  const all = useResource<List<Machine & { worker_id?: string; outdated?: boolean; stale?: boolean }>>('/agents?limit=1000', { every: 10_000 })
  return (
    <>
      <h1>Agents</h1>
      <p class="headline">Machines that watch themselves and report here.</p>
      {all.problem && <Fault problem={all.problem} retry={all.reload} />}
      {!all.value ? !all.problem && <Loading what="the agents" /> : all.value.items.length === 0 ? (
        <Empty title="No agent has reported yet.">Run <code>lull agent run</code> with <code>--server</code> and a token of the role agent on a machine.</Empty>
      ) : all.value.items.map((m) => {
        const r = (m.report ?? {}) as AgentReport
        return (
          <Card key={m.name} title={m.name} aside={<span class={m.stale ? 'bad' : 'muted'}>{m.stale ? 'Not heard of: last report ' : 'reported '}<Time at={m.reported_at} /></span>}>
            <p>
              {m.stale ? 'What it sees now is not known.' : r.idle_minutes !== undefined && <>Idle for {minutes(r.idle_minutes)}. </>}
              {r.pause_holder && <span class="muted">{r.pause_holder === 'agent' ? 'It decides about itself. ' : 'The controller decides about it. '}</span>}
              {m.worker_id && <a href={`/workers/${encodeURIComponent(m.worker_id)}`}>Its worker</a>}
              {m.outdated && <span class="bad"> It is older than this server (version {r.version}).</span>}
            </p>
            {(r.alarms ?? []).map((a) => <p key={a.code} class="fault">{a.sentence}</p>)}
            {r.action && <p>{words(r.action.action)}: {words(r.action.phase)} <span class="muted">({words(r.action.reason)})</span></p>}
            <Readings list={r.readings ?? []} name={m.name} />
            {(r.holds ?? []).length > 0 && <ul class="blocks">{r.holds!.map((b, i) => <li key={i}><code>{b.code}</code> {b.sentence}</li>)}</ul>}
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
