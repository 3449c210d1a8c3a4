// Machines that report to this server: agents with their signals, hosts with
// their instances.

import { Block, List, Machine, Reading } from '../api'
import type { PageProps } from '../app'
import { useResource } from '../resource'
import { minutes, span } from '../time'
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

interface Instance { id?: string; name?: string; state?: string; runtime?: string; idle_for?: number; pause_at?: string | null; connections?: number; lease_held?: boolean; lease_reason?: string; blocks?: Block[] }

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

export function Hosts(_: PageProps) {
  const all = useResource<List<Machine>>('/hosts?limit=1000', { every: 10_000 })
  return (
    <>
      <h1>Hosts</h1>
      <p class="headline">Machines whose local instances are paused and woken by connections.</p>
      {all.problem && <Fault problem={all.problem} retry={all.reload} />}
      {!all.value ? !all.problem && <Loading what="the hosts" /> : all.value.items.length === 0 ? (
        <Empty title="No host has reported yet.">A host reports here with a token of the role host.</Empty>
      ) : all.value.items.map((m) => {
        const list = (Array.isArray(m.report?.instances) ? m.report.instances : []) as Instance[]
        return (
          <Card key={m.name} title={m.name} class="flush" aside={<span class={m.age_seconds > 120 ? 'bad' : 'muted'}>{m.age_seconds > 120 ? 'Not heard of: last report ' : 'reported '}<Time at={m.reported_at} /></span>}>
            {list.length === 0 ? <p class="muted">It has no instances.</p> : (
              <div class="scroll" tabIndex={0} role="region" aria-label={`Instances of ${m.name}`}>
                <table>
                  <thead><tr><th scope="col">Instance</th><th scope="col">State</th><th scope="col">Idle for</th><th scope="col">Pauses</th><th scope="col">Held by</th></tr></thead>
                  <tbody>
                    {list.map((i) => (
                      <tr key={i.id ?? i.name}>
                        <th scope="row">{i.name ?? i.id} <span class="muted small">{i.runtime}</span></th>
                        <td><span class={`state ${i.state === 'running' ? 'active' : 'quiet'}`}>{i.state}</span></td>
                        <td>{i.idle_for !== undefined ? span(i.idle_for) : '–'}</td>
                        <td><Time at={i.pause_at} none="–" /></td>
                        <td class="muted">{[i.connections ? `${i.connections} connections` : '', i.lease_held ? `lease ${i.lease_reason ?? ''}` : ''].filter(Boolean).join(', ') || '–'}</td>
                      </tr>
                    ))}
                  </tbody>
                </table>
              </div>
            )}
          </Card>
        )
      })}
    </>
  )
}
