// Hosts, one host, and one instance with its explanation. They are polled, since
// host reports are not in the event stream.

import { HostEvent, HostInstance, HostSummary, HostView, HostWhy, List } from '../api'
import type { PageProps } from '../router'
import { useResource } from '../resource'
import { go } from '../router'
import { span } from '../time'
import { Card, Empty, Fault, Loading, Time, words } from '../parts/ui'
import { Answer, Grounds, moment, pathAt, Then } from '../parts/account'
import { Asked, asleep, Doing, hostAt, InstanceMenu, Logs, useCommands } from '../parts/instanceactions'
import { Menu, MenuItems } from '../parts/menu'
import { LookBack } from '../parts/timeline'

const every = 5_000

export function Hosts(p: PageProps) {
  const [, host, instance] = p.place.path
  if (!host) return <All />
  return instance ? <Instance key={`${host}/${instance}`} host={host} name={instance} at={moment(p.place.query.get('at'))} logs={p.place.query.has('logs')} operator={p.operator} /> : <Host key={host} name={host} operator={p.operator} />
}

/** "2 running, 5 paused", the most awake first. */
function states(h: HostSummary): string {
  const order = ['running', 'starting', 'resuming', 'pausing', 'paused', 'reclaimed', 'hibernated', 'stopping', 'stopped']
  const known = Object.keys(h.counts).sort((a, b) => order.indexOf(a) - order.indexOf(b))
  return known.map((s) => `${h.counts[s]} ${s}`).join(', ') || 'none'
}

function bytes(n: number): string {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB']
  let u = 0
  while (n >= 1024 && u < units.length - 1) { n /= 1024; u++ }
  return `${n.toLocaleString('en', { maximumFractionDigits: n < 10 && u > 0 ? 1 : 0 })} ${units[u]}`
}

function Heard(p: { h: HostSummary }) {
  const { h } = p
  if (h.heard) return <span class="state active">reporting <Time at={h.heard_at} /></span>
  return <span class="state unknown">{h.heard_at ? <>stopped reporting <Time at={h.heard_at} as="clock" /></> : 'never reported'}</span>
}

function Memory(p: { h: HostSummary }) {
  const { h } = p
  if (!h.heard || !h.held_bytes) return <>–</>
  return <>{bytes(h.held_bytes)}{h.memory.limit_bytes > 0 && <span class="muted"> of {bytes(h.memory.limit_bytes)}</span>}</>
}

function All() {
  const all = useResource<List<HostSummary>>('/hosts?limit=1000', { every })
  const list = all.value?.items ?? []
  const lost = list.filter((h) => !h.heard).length
  return (
    <>
      <h1>Hosts</h1>
      <p class="headline">Machines whose local instances are paused when idle and woken by connections.{lost > 0 && <strong class="bad"> {lost} of {list.length} stopped reporting.</strong>}</p>
      {all.problem && <Fault problem={all.problem} retry={all.reload} />}
      {!all.value ? !all.problem && <Loading what="the hosts" /> : list.length === 0 ? (
        <Empty title="No hosts yet">Create a token with <code>lull token create NAME --role host --machine NAME</code>, then run <code>lull host --server</code> with it on the machine.</Empty>
      ) : (
        <div class="card scroll" tabIndex={0} role="region" aria-label="Hosts">
          <table>
            <thead><tr><th scope="col">Host</th><th scope="col">Status</th><th scope="col">Instances</th><th scope="col">Memory</th><th scope="col">Version</th></tr></thead>
            <tbody>
              {list.map((h) => (
                <tr key={h.name}>
                  <th scope="row"><a href={hostAt(h.name)}>{h.name}</a></th>
                  <td><Heard h={h} />{h.halted && h.heard && <div class="bad small">Halted: nothing is paused automatically</div>}</td>
                  <td>{h.heard ? states(h) : <span class="muted">unknown{h.heard_at && h.instances_total > 0 && `; last report: ${states(h)}`}</span>}</td>
                  <td><Memory h={h} /></td>
                  <td>{h.version || '–'}{h.outdated && <div class="bad small">older than this server</div>}</td>
                </tr>
              ))}
            </tbody>
          </table>
          {all.value.next && <p class="muted">Not all hosts are shown. To list all, run <code>lull host ls</code>.</p>}
        </div>
      )}
    </>
  )
}

function Host(p: { name: string; operator: boolean }) {
  const r = useResource<HostView>(`${hostAt(p.name)}?limit=1000`, { every })
  const h = r.value
  const commands = useCommands({ host: p.name, can: h, operator: p.operator, reload: r.reload })
  if (!h) {
    if (!r.problem) return <Loading what="the host" />
    return r.problem.status === 404
      ? <><h1>Not found</h1><Empty title={`Host ${p.name} not found`}><a href="/hosts">View all hosts</a></Empty></>
      : <><h1>Host</h1><Fault problem={r.problem} retry={r.reload} /></>
  }
  return (
    <>
      <p class="crumb"><a href="/hosts">Hosts</a></p>
      <h1>{h.name}</h1>
      {r.problem && <Fault problem={r.problem} retry={r.reload} what="Cannot refresh. This may be out of date." />}
      {!h.heard && <p class="fault" role="status">{h.unheard}</p>}
      {h.halted && <p class="fault" role="status">{h.heard ? 'Halted: nothing is paused or stopped automatically.' : 'Halted when it last reported.'}</p>}
      {h.faults.map((f) => <p key={f} class="fault">{f}</p>)}
      <Card title="Host">
        <dl class="facts two">
          <div><dt>Status</dt><dd><Heard h={h} />{h.server && <span class="muted"> to server {h.server}</span>}</dd></div>
          <div><dt>Version</dt><dd>{h.version || '–'}{h.outdated && <span class="bad"> older than this server</span>}</dd></div>
          <div><dt>Instances</dt><dd>{h.heard ? states(h) : 'unknown'}</dd></div>
          <div><dt>Memory</dt><dd><Memory h={h} />{h.heard && h.memory.waiting > 0 && <span class="bad"> {h.memory.waiting} waiting for memory</span>}</dd></div>
        </dl>
      </Card>
      <Card title="Instances" class="flush">
        {h.instances.length === 0 ? <p class="muted">{h.heard ? 'No instances.' : 'No known instances.'}</p> : (
          <div class="scroll" tabIndex={0} role="region" aria-label={`Instances of ${h.name}`}>
            <table>
              <thead><tr><th scope="col">Instance</th><th scope="col">State</th><th scope="col">Idle for</th><th scope="col">Next step</th><th scope="col">Held by</th><th scope="col">Memory</th><th scope="col">Ports</th><th scope="col"><span class="hidden">Actions</span></th></tr></thead>
              <tbody>{h.instances.map((i) => <Row key={i.id} host={h.name} i={i} asked={commands.asked(i)} menu={commands.menu(i)} />)}</tbody>
            </table>
          </div>
        )}
        {p.operator && h.heard && commands.why && <p class="muted" data-testid="no-commands">{commands.why}</p>}
        {commands.dialog}
        {(h.next || h.left_out > 0) && <p class="muted">Not all instances are shown. To list all reported ones, run <code>lull host get {h.name}</code>.</p>}
      </Card>
    </>
  )
}

function State(p: { i: HostInstance; asked?: Asked }) {
  const { i } = p
  const kind = i.state === 'unknown' ? 'unknown' : i.state === 'running' ? 'active' : 'quiet'
  return (
    <>
      {p.asked ? <Doing asked={p.asked} /> : <span class={`state ${kind}`}>{i.state}</span>}
      {i.last_state && <span class="muted small"> was {i.last_state}</span>}
      {i.crash_looping && <span class="bad small"> crash loop</span>}
      {i.snooze_until && <span class="muted small"> snoozed until <Time at={i.snooze_until} as="clock" /></span>}
      {!i.enabled && <span class="muted small"> disabled</span>}
    </>
  )
}

function Next(p: { i: HostInstance }) {
  const { i } = p
  const steps: Record<string, string> = { reclaimed: 'frees memory', hibernated: 'hibernates', stopped: 'stops' }
  if (i.waiting) return <>waiting for memory, position {i.waiting.place}</>
  if (i.pause_at) return <>pauses <Time at={i.pause_at} /></>
  if (i.state === 'running') return <>keeps running</>
  if (i.next_step_at) return <>{steps[i.next_step] ?? i.next_step} <Time at={i.next_step_at} /></>
  return <>{asleep.includes(i.state) ? 'wakes on a connection' : '–'}</>
}

/** Returns what keeps an instance running besides its timeout. A lease also holds a paused one. */
function holders(i: HostInstance): string {
  const names: Record<string, (signal: string) => string> = {
    connection_open: () => `${i.connections} connection${i.connections === 1 ? '' : 's'}`, recent_activity: (s) => s || 'activity', signal_unknown: (s) => `unknown ${s}`,
  }
  const held = i.leases.map((l) => `lease ${l.holder}${l.reason ? ` (${l.reason})` : ''}`)
  if (i.state === 'running') held.push(...i.blocks.filter((b) => !['not_idle_yet', 'lease_held', 'status_not_running'].includes(b.code)).map((b) => names[b.code]?.(b.signal ?? '') ?? words(b.code)))
  return held.join(', ') || '–'
}

function Row(p: { host: string; i: HostInstance; asked?: Asked; menu: MenuItems }) {
  const { i } = p
  return (
    <tr>
      <th scope="row"><a href={`${hostAt(p.host)}/${encodeURIComponent(i.name)}`}>{i.name}</a> <span class="muted small">{i.runtime}</span></th>
      <td><State i={i} asked={p.asked} /></td>
      <td>{i.state === 'running' ? span(i.idle_for) : '–'}</td>
      <td><Next i={i} /></td>
      <td class="muted">{holders(i)}</td>
      <td>{i.memory_bytes > 0 && i.state !== 'unknown' ? bytes(i.memory_bytes) : '–'}</td>
      <td class="muted">{i.endpoints.map((e) => e.listen).join(', ') || '–'}</td>
      <td class="end"><InstanceMenu i={i} menu={p.menu} /></td>
    </tr>
  )
}

function Instance(p: { host: string; name: string; at: number | null; logs: boolean; operator: boolean }) {
  const path = `${hostAt(p.host)}/instances/${encodeURIComponent(p.name)}/why`
  const why = useResource<HostWhy>(path, { every })
  const y = why.value
  const i = y?.instance
  const host = useResource<HostView>(`${hostAt(p.host)}?limit=1`, { every })
  const commands = useCommands({ host: p.host, can: host.value, operator: p.operator, reload: () => { why.reload(); host.reload() } })
  const crumb = <p class="crumb"><a href="/hosts">Hosts</a> / <a href={hostAt(p.host)}>{p.host}</a></p>
  if (why.problem?.status === 404) return <>{crumb}<h1>Not found</h1><Empty title={`Host ${p.host} has no instance ${p.name}.`}><a href={hostAt(p.host)}>View its instances</a></Empty></>
  return (
    <>
      {crumb}
      <h1>{p.name}</h1>
      {commands.dialog}
      <Answer why={why} />
      {i && p.operator && <div class="actions"><Menu label={`Actions for ${p.name}`} items={commands.menu(i).slice(2, -1)}>Actions</Menu></div>}
      {y?.readings === 'unknown' && y.unheard && <p class="fault" role="status">Readings: unknown. {y.unheard}</p>}
      <LookBack onPick={(at) => go(pathAt(at), p.at !== null)} />
      {p.at !== null && <Then path={path} at={p.at} onEnd={() => go(location.pathname)} />}
      {y && (
        <div class="columns">
          <div><Grounds y={y} now title="Why" aside={<span class="muted small">{y.readings === 'live' ? <>checked <Time at={y.at} /></> : 'no live readings'}</span>} /></div>
          <div>{i && <Facts i={i} asked={commands.asked(i)} />}</div>
        </div>
      )}
      {y && y.events.length > 0 && <Timeline events={y.events} />}
      {i && p.operator && <Card title="Logs">{commands.why && <p class="muted">{commands.why}</p>}<Logs host={p.host} name={p.name} why={commands.why} now={p.logs} /></Card>}
    </>
  )
}

/** What happened to an instance, newest first. */
function Timeline(p: { events: HostEvent[] }) {
  return (
    <Card title="Timeline" class="flush">
      <div class="scroll" tabIndex={0} role="region" aria-label="Timeline">
        <table data-testid="timeline">
          <thead><tr><th scope="col">Time</th><th scope="col">Event</th><th scope="col">State</th><th scope="col">By</th><th scope="col">Reason</th></tr></thead>
          <tbody>{[...p.events].reverse().map((e, n) => <tr key={n} data-type={e.type}><td><Time at={e.time} as="clock" /></td><td>{words(e.type)}</td><td>{e.state}</td><td>{words(e.by) || '–'}</td><td class="muted">{e.reason || '–'}</td></tr>)}</tbody>
        </table>
      </div>
    </Card>
  )
}

function Facts(p: { i: HostInstance; asked?: Asked }) {
  const { i } = p
  return (
    <Card title="Instance">
      <dl class="facts">
        <div><dt>State</dt><dd><State i={i} asked={p.asked} />{i.state_since && <span class="muted"> since <Time at={i.state_since} as="clock" /></span>}</dd></div>
        <div><dt>Runtime</dt><dd>{i.runtime}{i.image && <span class="muted"> {i.image}</span>}</dd></div>
        <div><dt>Next step</dt><dd><Next i={i} /></dd></div>
        <div><dt>Pauses after</dt><dd>{i.pause_after > 0 ? span(i.pause_after) : 'never'}{i.stop_after > 0 && <span class="muted">, stops {span(i.stop_after)} later</span>}</dd></div>
        <div><dt>Last paused</dt><dd><Time at={i.last_paused_at} />{i.last_paused_by && <span class="muted"> by {words(i.last_paused_by)}</span>}</dd></div>
        <div><dt>Last resumed</dt><dd><Time at={i.last_resumed_at} />{i.last_resumed_by && <span class="muted"> by {words(i.last_resumed_by)}</span>}</dd></div>
        <div><dt>Pauses, wakes</dt><dd data-testid="counters">{i.pause_count}, {i.wake_count}{i.restart_count > 0 && `; ${i.restart_count} restarts`}</dd></div>
        <div><dt>Connections</dt><dd>{i.connections}</dd></div>
        <div><dt>Memory</dt><dd>{i.memory_bytes > 0 ? bytes(i.memory_bytes) : 'unknown'}{i.memory_limit > 0 && <span class="muted"> of {bytes(i.memory_limit)}</span>}</dd></div>
        {i.reclaimed_bytes > 0 && <div><dt>Memory freed</dt><dd>{bytes(i.reclaimed_bytes)}</dd></div>}
        <div><dt>Ports</dt><dd>{i.endpoints.length === 0 ? '–' : i.endpoints.map((e) => <div key={e.listen}>{e.listen} <span class="muted">{e.path}{e.status && `, ${e.status}`}</span></div>)}</dd></div>
        {i.exit_code !== null && <div><dt>Exit code</dt><dd>{i.exit_code}</dd></div>}
        {i.status_reason && <div><dt>Reason</dt><dd>{i.status_reason}</dd></div>}
      </dl>
    </Card>
  )
}
