// Commands for instances of a host, on its page and on that of an instance.

import { useState } from 'preact/hooks'
import { ask, HostInstance, HostSummary, Problem } from '../api'
import { clock, useNow } from '../time'
import { Menu, MenuItems } from './menu'
import { attempt, Button, Dialog, say, Time } from './ui'

export const hostAt = (name: string) => `/hosts/${encodeURIComponent(name)}`

export const asleep = ['paused', 'reclaimed', 'hibernated']

type Verb = 'pause' | 'resume' | 'start' | 'stop'

const verbs: Record<Verb, { label: string; doing: string; to: string[]; takes: (i: HostInstance) => boolean }> = {
  pause: { label: 'Pause…', doing: 'pausing', to: asleep, takes: (i) => i.state === 'running' },
  resume: { label: 'Resume', doing: 'resuming', to: ['running'], takes: (i) => asleep.includes(i.state) },
  start: { label: 'Start', doing: 'starting', to: ['running'], takes: (i) => i.state === 'stopped' },
  stop: { label: 'Stop…', doing: 'stopping', to: ['stopped'], takes: (i) => i.state !== 'stopped' && i.state !== 'unknown' },
}

/** A command whose effect is not reported yet. */
export interface Asked { verb: Verb; unknown: boolean; since: string | null }

interface Answered { outcome: 'done' | 'unknown'; detail?: string }

interface Props { host: string; can: HostSummary | undefined; operator: boolean; reload: () => void }

/** Why no command can be given; empty if one can. */
function refusal(p: Props): string {
  if (!p.can) return 'Checking whether the host accepts commands.'
  if (!p.can.heard) return 'The host has stopped reporting.'
  return p.can.accepts_commands ? '' : 'The host does not accept commands from the server. To allow them, run lull host with --server-commands.'
}

/** The commands for instances of a host, and which of them are in progress. */
export function useCommands(p: Props) {
  const [asked, setAsked] = useState<Record<string, Asked>>({})
  const [open, setOpen] = useState<{ kind: 'pause' | 'stop' | 'snooze'; i: HostInstance } | null>(null)
  const why = refusal(p)
  const path = (i: HostInstance, verb: string) => `${hostAt(p.host)}/instances/${encodeURIComponent(i.id)}/${verb}`
  const mark = (i: HostInstance, a?: Asked) => setAsked((was) => { const { [i.id]: _, ...rest } = was; return a ? { ...rest, [i.id]: a } : rest })
  const give = async (i: HostInstance, verb: Verb, force = false) => {
    setOpen(null)
    const a = { verb, unknown: false, since: i.state_since }
    mark(i, a)
    try {
      const { value } = await ask<Answered>('POST', path(i, verb) + (force ? '?force=true' : ''))
      if (value.outcome !== 'done') {
        mark(i, { ...a, unknown: true })
        say(`${i.name}: ${value.detail ?? 'the outcome is unknown.'}`, true)
      }
    } catch (e) {
      mark(i)
      say(e instanceof Problem ? e.message : String(e), true)
    }
    p.reload()
  }
  const snooze = async (i: HostInstance, done: string, body: object) => {
    setOpen(null)
    await attempt('', async () => {
      const { value } = await ask<Answered>('POST', path(i, 'snooze'), body)
      say(value.outcome === 'done' ? done : `${i.name}: ${value.detail ?? 'the outcome is unknown.'}`, value.outcome !== 'done')
    })
    p.reload()
  }
  const run = (i: HostInstance, verb: Verb) => verb === 'pause' || verb === 'stop' ? setOpen({ kind: verb, i }) : void give(i, verb)
  return {
    /** Why commands are disabled, for the page. */
    why,
    /** A command for an instance whose effect is not reported yet. */
    asked: (i: HostInstance): Asked | undefined => {
      const a = asked[i.id]
      if (!a || verbs[a.verb].to.includes(i.state) || a.unknown && i.state_since !== a.since) return undefined
      return a
    },
    menu: (i: HostInstance): MenuItems => {
      const items: MenuItems = [{ label: 'Open', href: `${hostAt(p.host)}/${encodeURIComponent(i.name)}` }]
      if (!p.operator) return items
      items.push(null)
      for (const [verb, v] of Object.entries(verbs) as [Verb, (typeof verbs)[Verb]][]) if (v.takes(i)) items.push({ label: v.label, why, run: () => run(i, verb) })
      items.push({ label: 'Snooze…', why, run: () => setOpen({ kind: 'snooze', i }) }, { label: 'Logs', why, href: `${hostAt(p.host)}/${encodeURIComponent(i.name)}?logs=1` })
      return items
    },
    dialog: open?.kind === 'snooze' ? <Snooze i={open.i} onClose={() => setOpen(null)} send={(done, body) => snooze(open.i, done, body)} />
      : open && <Confirm kind={open.kind} i={open.i} onClose={() => setOpen(null)} send={(force) => give(open.i, open.kind as Verb, force)} />,
  }
}

/** The menu of an instance's row. */
export function InstanceMenu(p: { i: HostInstance; menu: MenuItems }) {
  return <Menu label={`Actions for ${p.i.name}`} kind="dots" items={p.menu}>⋯</Menu>
}

/** What a command is doing, until the host reports its effect. */
export function Doing(p: { asked: Asked }) {
  return p.asked.unknown ? <span class="state unknown">{p.asked.verb}: outcome unknown</span> : <span class="state quiet" role="status">{verbs[p.asked.verb].doing}</span>
}

function Confirm(p: { kind: 'pause' | 'stop'; i: HostInstance; onClose: () => void; send: (force: boolean) => Promise<void> }) {
  const held = p.i.connections > 0 || p.i.leases.length > 0
  const [force, setForce] = useState(false)
  return (
    <Dialog title={`${p.kind === 'pause' ? 'Pause' : 'Stop'} ${p.i.name}?`} onClose={p.onClose}>
      {held && <p><strong>It is in use:</strong> {p.i.connections} connection{p.i.connections === 1 ? '' : 's'}, {p.i.leases.length} lease{p.i.leases.length === 1 ? '' : 's'}.</p>}
      {p.kind === 'pause' ? <p>A connection resumes it.</p> : <p>Stops the instance even if it is in use. Connections do not start it again.</p>}
      {p.kind === 'pause' && <p><label><input type="checkbox" id="i-force" checked={force} onChange={(e) => setForce(e.currentTarget.checked)} /> Pause even if connections or leases hold it</label></p>}
      <div class="actions"><button type="button" onClick={p.onClose}>Cancel</button><Button kind="primary" onClick={() => p.send(force)}>{p.kind === 'pause' ? 'Pause' : 'Stop'}</Button></div>
    </Dialog>
  )
}

function Snooze(p: { i: HostInstance; onClose: () => void; send: (done: string, body: object) => Promise<void> }) {
  const now = useNow()
  const choices: [string, number][] = [['For 1 hour', 60], ['For 4 hours', 240], ['For 24 hours', 1440]]
  return (
    <Dialog title={`Snooze ${p.i.name}`} onClose={p.onClose}>
      {p.i.snooze_until && <p>Snoozed until <Time at={p.i.snooze_until} as="clock" />.</p>}
      <div class="actions choices">
        {choices.map(([label, minutes]) => <Button key={label} onClick={() => p.send(`Snoozed ${p.i.name} until ${clock(now + minutes * 60_000, now)}.`, { minutes })}>{label}</Button>)}
        {p.i.snooze_until && <Button onClick={() => p.send(`Ended the snooze of ${p.i.name}.`, {})}>End snooze</Button>}
      </div>
      <div class="actions"><button type="button" onClick={p.onClose}>Cancel</button></div>
    </Dialog>
  )
}

/** The last lines of an instance's output, loaded on request. */
export function Logs(p: { host: string; name: string; why: string; now: boolean }) {
  const [log, setLog] = useState<{ text: string; cut: boolean; at: string } | null>(null)
  const read = () => attempt('', async () => {
    const { value } = await ask<{ text: string; cut: boolean }>('GET', `${hostAt(p.host)}/instances/${encodeURIComponent(p.name)}/logs`)
    setLog({ ...value, at: new Date().toISOString() })
  }).then(() => {})
  const [first, setFirst] = useState(p.now)
  if (first && !p.why) { setFirst(false); void read() }
  return (
    <>
      <p><Button onClick={read} disabled={p.why !== ''} why={p.why}>{log ? 'Reload' : 'Load logs'}</Button>{log && <span class="muted small"> last lines, loaded <Time at={log.at} /></span>}</p>
      {log?.cut && <p class="muted small">Earlier lines are omitted.</p>}
      {log && (log.text ? <pre class="log" data-testid="logs">{log.text}</pre> : <p class="muted">No output.</p>)}
    </>
  )
}
