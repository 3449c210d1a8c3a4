// The timeline of a worker: its state, blocks, and each signal against its
// threshold. Unrecorded time is hatched, so that it never looks idle.

import { ComponentChildren } from 'preact'
import { useEffect, useId, useMemo, useRef, useState } from 'preact/hooks'
import { Entry } from '../api'
import { figure, Point, Timeline } from '../evidence'
import { useResource } from '../resource'
import { clock, exact, local, span } from '../time'
import { Card, Fault, useWidth, words } from './ui'

type Kind = 'running' | 'warned' | 'pausing' | 'paused' | 'starting' | 'unknown'

interface Stretch { from: number; to: number; kind: Kind; said: string }

const called: Record<Kind, string> = { running: 'Running', warned: 'Warned', pausing: 'Pausing', paused: 'Paused', starting: 'Starting', unknown: 'Unknown' }

const of: Record<string, Kind> = { STOPPED: 'paused', STOPPING: 'pausing', DRAINING: 'pausing', PENDING: 'starting', PROVISIONING: 'starting', STARTING: 'starting', TERMINATING: 'paused', TERMINATED: 'paused' }

/** Blocks that the signals and states already show. */
const plain = new Set(['recent_activity', 'signal_active', 'not_idle_yet', 'warning_pending', 'signal_unknown', 'status_not_running'])

const holding: Record<string, string> = { lease_held: 'lease held', in_snooze_period: 'snoozed' }

const ms = (at: string) => new Date(at).getTime()

/** Returns the states of a timeline as contiguous stretches. */
export function stretches(t: Timeline): Stretch[] {
  const out: Stretch[] = []
  let at = ms(t.from)
  const add = (from: number, to: number, kind: Kind, said: string) => {
    if (from > at) fill(from)
    if (to <= at) return
    const last = out[out.length - 1]
    if (last && last.kind === kind && last.said === said && last.to === at) last.to = to
    else out.push({ from: at, to, kind, said })
    at = to
  }
  const fill = (to: number) => { out.push({ from: at, to, kind: 'unknown', said: 'No data recorded.' }); at = to }
  for (const p of t.power) {
    const from = ms(p.from), to = ms(p.to), kind = of[p.status]
    if (kind) { add(from, to, kind, p.status === 'DRAINING' ? 'Draining.' : ''); continue }
    if (p.status !== 'RUNNING') { add(from, to, 'unknown', p.status ? words(p.status).toLowerCase() : 'No data recorded.'); continue }
    if (from > at) fill(from)
    for (const v of t.verdicts) {
      const a = Math.max(ms(v.from), from), b = Math.min(ms(v.to), to)
      if (b <= a || b <= at) continue
      add(a, b, v.blocks.includes('warning_pending') ? 'warned' : 'running', v.reason)
    }
    if (at < to) fill(to)
  }
  if (at < ms(t.to)) fill(ms(t.to))
  return out
}

const at = <T,>(list: T[], now: number, from: (x: T) => string, to: (x: T) => string) => list.find((x) => ms(from(x)) <= now && now < ms(to(x)))

const reading = (points: Point[], now: number) => at(points, now, (p) => p.at, (p) => p.until)

export function TimelineCard(p: { path: string; mine: (e: Entry) => boolean; picked: number | null; onPick: (at: number) => void; more?: (t: Timeline) => ComponentChildren; children?: ComponentChildren }) {
  const [days, setDays] = useState(1)
  const [from, setFrom] = useState('')
  const r = useResource<Timeline>(`${p.path}/timeline${from}`, { on: p.mine, every: 60_000 })
  const choose = (n: number) => {
    setDays(n)
    setFrom(n === 1 ? '' : '?from=' + encodeURIComponent(new Date(Date.now() - n * 86_400_000).toISOString()))
  }
  const t = r.value
  return (
    <>
    <Card title="Timeline" class="timeline" aside={
      <div class="pick" role="group" aria-label="Time range">
        {[1, 7].map((n) => <button key={n} type="button" aria-pressed={days === n} onClick={() => choose(n)}>{n === 1 ? '24 h' : '7 d'}</button>)}
      </div>
    }>
      {r.problem && <Fault problem={r.problem} retry={r.reload} what="Cannot load the timeline." />}
      {t ? <Chart t={t} days={days} picked={p.picked} onPick={p.onPick} /> : <p class="loading await" role="status">Loading timeline…</p>}
    </Card>
    {p.children}
    {t && p.more?.(t)}
    </>
  )
}

const bandHeight = 22, marks = 14, label = 17, tall = 46, low = 10, gap = 9, axis = 20

function Chart(p: { t: Timeline; days: number; picked: number | null; onPick: (at: number) => void }) {
  const { t } = p
  const box = useRef<HTMLDivElement>(null)
  const width = useWidth(box)
  const [over, setOver] = useState<number | null>(null)
  const hatch = useId()
  const from = ms(t.from), to = ms(t.to)
  const x = (time: number) => ((Math.min(Math.max(time, from), to) - from) / (to - from)) * width
  const bands = useMemo(() => stretches(t), [t])
  const held = [...new Set(t.verdicts.flatMap((v) => v.blocks))].filter((b) => !plain.has(b)).sort()
  const whole = useMemo(() => bands.reduce<Stretch[]>((all, b) => { const last = all[all.length - 1]; if (last?.kind === b.kind) last.to = b.to; else all.push({ ...b }); return all }, []), [bands])
  const still = bands.filter((b) => b.kind === 'paused')
  const cursor = over ?? p.picked
  const now = Date.now()

  let y = marks
  const bandTop = y
  y += bandHeight + gap
  const lanes = t.signals.map((s) => {
    const top = y + label, height = s.unit ? tall : low
    y = top + height + gap
    return { s, top, height }
  })
  const holds = held.map((code) => {
    const top = y + label
    y = top + low + gap
    return { code, top }
  })
  const bottom = y
  const rect = (a: number, b: number, top: number, height: number) => `M${x(a).toFixed(1)} ${top}H${Math.max(x(b), x(a) + 1).toFixed(1)}V${top + height}H${x(a).toFixed(1)}Z`
  const step = p.days === 1 ? 300_000 : 1_800_000
  const move = (time: number) => setOver(Math.min(to, Math.max(from, time)))
  const keys = (e: KeyboardEvent) => {
    const here = over ?? p.picked ?? to
    const by = { ArrowLeft: -step, ArrowDown: -step, ArrowRight: step, ArrowUp: step, PageDown: -12 * step, PageUp: 12 * step }[e.key]
    if (by) move((Math.round(here / step) * step) + by)
    else if (e.key === 'Home') move(from)
    else if (e.key === 'End') move(to)
    else if (e.key === 'Enter' || e.key === ' ') p.onPick(here)
    else return
    e.preventDefault()
  }
  const timeAt = (e: MouseEvent) => from + ((e.clientX - box.current!.getBoundingClientRect().left) / width) * (to - from)
  const changes = t.changes.filter((c) => (c.from === 'RUNNING' && c.to !== 'DRAINING') || c.to === 'RUNNING' || (c.from === 'DRAINING' && c.to !== 'RUNNING'))
  return (
    <>
      <ul class="legend" aria-hidden="true">
        {(Object.keys(called) as Kind[]).filter((k) => bands.some((b) => b.kind === k)).map((k) => <li key={k}><span class={`swatch ${k}`} />{called[k]}</li>)}
        {t.signals.length > 0 && <li><span class="swatch used" />Signal active</li>}
        {t.signals.some((s) => s.unit) && <li><span class="swatch line" />Threshold</li>}
      </ul>
      <div ref={box} class="chart" role="slider" tabIndex={0} aria-label="Timeline cursor. Press Enter to explain the state at that time." aria-orientation="horizontal" aria-valuemin={Math.round(from / 60_000)} aria-valuemax={Math.round(to / 60_000)} aria-valuenow={Math.round((cursor ?? to) / 60_000)}
        aria-valuetext={said(t, bands, cursor ?? to - 1, now)} onKeyDown={keys} onPointerMove={(e) => move(timeAt(e))} onPointerLeave={() => setOver(null)} onBlur={() => setOver(null)} onClick={(e) => p.onPick(Math.min(to, Math.max(from, timeAt(e))))}>
        {width > 0 && (
          <svg width={width} height={bottom + axis} aria-hidden="true">
            <defs><pattern id={hatch} width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="7" height="7" class="hatchback" /><rect width="2" height="7" class="hatch" /></pattern></defs>
            {ticks(from, to, width).map((k) => <g key={k.at}><line x1={x(k.at)} x2={x(k.at)} y1={bandTop} y2={bottom} class={k.strong ? 'grid strong' : 'grid'} /><text x={x(k.at)} y={bottom + 14} text-anchor="middle" class={k.strong ? 'tick strong' : 'tick'}>{k.text}</text></g>)}
            {(['running', 'warned', 'pausing', 'paused', 'starting'] as Kind[]).map((k) => <path key={k} class={`band ${k}`} d={bands.filter((b) => b.kind === k).map((b) => rect(b.from, b.to, bandTop, bandHeight)).join('')} />)}
            <path fill={`url(#${hatch})`} d={bands.filter((b) => b.kind === 'unknown').map((b) => rect(b.from, b.to, bandTop, bandHeight)).join('')} />
            {whole.filter((b) => x(b.to) - x(b.from) > 58).map((b) => <text key={b.from} class={`on ${b.kind}`} x={(x(b.from) + x(b.to)) / 2} y={bandTop + bandHeight / 2 + 4} text-anchor="middle">{called[b.kind]}</text>)}
            {changes.map((c, i) => <path key={i} class={c.to === 'RUNNING' ? 'mark resume' : 'mark pause'} d={c.to === 'RUNNING' ? `M${x(ms(c.at)) - 3.5} 2v9l8-4.5z` : `M${x(ms(c.at)) - 4} 2h3v9h-3zm5 0h3v9h-3z`}><title>{`${c.to === 'RUNNING' ? 'Resumed' : 'Paused'} ${exact(c.at)}${c.by ? ` by ${c.by}` : ''}${c.reason ? ` (${words(c.reason)})` : ''}`}</title></path>)}
            {lanes.map(({ s, top, height }) => <Lane key={s.signal} s={s} top={top} height={height} rect={rect} from={from} to={to} still={still} hatch={hatch} width={width} />)}
            {holds.map(({ code, top }) => <g key={code}><text class="name" x={0} y={top - 5}>{holding[code] ?? words(code)}</text><path class="back" d={rect(from, to, top, low)} /><path class="hold" d={t.verdicts.filter((v) => v.blocks.includes(code)).map((v) => rect(ms(v.from), ms(v.to), top, low)).join('')} /></g>)}
            {p.picked !== null && p.picked >= from && <line class="cursor picked" x1={x(p.picked)} x2={x(p.picked)} y1={bandTop - 4} y2={bottom} />}
            {cursor !== null && cursor >= from && <line class="cursor" x1={x(cursor)} x2={x(cursor)} y1={bandTop - 4} y2={bottom} />}
          </svg>
        )}
      </div>
      <div class="readout">{cursor !== null && cursor >= from ? <Readout t={t} bands={bands} at={cursor} /> : <span class="muted">Point at or touch a time, or use the arrow keys. Click or press Enter to explain the state at that time.</span>}</div>
      <Tables t={t} bands={bands} />
    </>
  )
}

function Lane(p: { s: Timeline['signals'][number]; top: number; height: number; width: number; from: number; to: number; still: Stretch[]; hatch: string; rect: (a: number, b: number, top: number, height: number) => string }) {
  const { s, top, height, rect } = p
  const known = s.points.filter((q) => q.state === 'active' || q.state === 'quiet')
  const highest = Math.max(0, ...known.map((q) => q.value ?? 0))
  const most = Math.max(highest, s.threshold, 1e-9) * 1.12
  const y = (v: number) => top + height - Math.max(1, Math.min(1, v / most) * height)
  const bars = (state: string) => known.filter((q) => q.state === state).map((q) => {
    const line = s.unit ? y(q.value ?? 0) : state === 'active' ? top : top + height - 2
    return rect(ms(q.at), ms(q.until), line, top + height - line)
  }).join('')
  return (
    <g>
      <text class="name" x={0} y={top - 5}>{s.signal}<tspan class="unit">{s.unit ? `  threshold ${figure(s.threshold, s.unit)}, peak ${figure(highest, s.unit)}` : '  events'}</tspan></text>
      <path fill={`url(#${p.hatch})`} d={rect(p.from, p.to, top, height)} />
      <path class="back still" d={p.still.map((b) => rect(b.from, b.to, top, height)).join('')} />
      <path class="back" d={s.points.filter((q) => q.state !== 'unknown').map((q) => rect(ms(q.at), ms(q.until), top, height)).join('')} />
      <path class="quiet" d={bars('quiet')} />
      <path class="active" d={bars('active')} />
      {s.unit && s.threshold > 0 && <line class="threshold" x1={0} x2={p.width} y1={y(s.threshold)} y2={y(s.threshold)} />}
    </g>
  )
}

/** Returns as many axis labels as fit. */
function ticks(from: number, to: number, width: number): { at: number; text: string; strong: boolean }[] {
  const hour = 3_600_000
  const every = [1, 2, 3, 6, 12, 24, 48].map((h) => h * hour).find((e) => ((to - from) / e) * 58 <= width) ?? 96 * hour
  const out = []
  const d = new Date(from)
  d.setHours(0, 0, 0, 0)
  for (let n = 0; d.getTime() < to && n < 400; n++) {
    const at = d.getTime()
    const x = ((at - from) / (to - from)) * width
    if (x >= 20 && x <= width - 22) {
      const midnight = d.getHours() === 0
      out.push({ at, strong: midnight, text: midnight ? d.toLocaleDateString('en', { weekday: 'short', day: 'numeric' }) : d.toLocaleTimeString('en', { hour: '2-digit', minute: '2-digit', hourCycle: 'h23' }) })
    }
    if (every >= 24 * hour) d.setDate(d.getDate() + every / (24 * hour))
    else d.setHours(d.getHours() + every / hour)
  }
  return out
}

const verdictAt = (t: Timeline, time: number) => at(t.verdicts, time, (v) => v.from, (v) => v.to)

/** Describes one moment, as the text alternative of the chart. */
function said(t: Timeline, bands: Stretch[], time: number, now: number): string {
  const b = bands.find((x) => x.from <= time && time < x.to)
  const v = b && (b.kind === 'running' || b.kind === 'warned') ? verdictAt(t, time) : undefined
  const signals = t.signals.map((s) => {
    const q = reading(s.points, time)
    return `${s.signal} ${!q ? 'unknown' : q.state}${q && q.value !== null && s.unit ? ` ${figure(q.value, s.unit)}` : ''}`
  })
  return [clock(time, now), b ? called[b.kind] : 'Unknown', v ? local(v.reason, now) : '', signals.join(', ')].filter(Boolean).join('. ')
}

function Readout(p: { t: Timeline; bands: Stretch[]; at: number }) {
  const { t } = p
  const now = Date.now()
  const b = p.bands.find((x) => x.from <= p.at && p.at < x.to) ?? p.bands[p.bands.length - 1]
  const v = b && (b.kind === 'running' || b.kind === 'warned') ? verdictAt(t, p.at) : undefined
  return (
    <>
      <p><strong>{clock(p.at, now)}</strong> {b && <span class={`state ${b.kind}`}>{called[b.kind]}</span>} <span class="muted">{local(v?.reason ?? b?.said ?? '', now)}</span></p>
      <ul>
        {t.signals.map((s) => {
          const q = b?.kind === 'paused' ? undefined : reading(s.points, p.at)
          return <li key={s.signal}>{s.signal} <span class={`state ${q?.state ?? 'unknown'}`}>{b?.kind === 'paused' ? '–' : !q ? 'unknown' : q.value !== null && s.unit ? figure(q.value, s.unit) : q.state}</span></li>
        })}
      </ul>
    </>
  )
}

/** The chart's data as tables. */
function Tables(p: { t: Timeline; bands: Stretch[] }) {
  const { t } = p
  const [open, setOpen] = useState(false)
  const now = Date.now()
  const rows = open ? [...p.bands].reverse().slice(0, 200) : []
  const sum = (points: Point[], state: string) => points.filter((q) => q.state === state).reduce((n, q) => n + ms(q.until) - ms(q.at), 0) / 1000
  return (
    <details onToggle={(e) => setOpen((e.currentTarget as HTMLDetailsElement).open)}>
      <summary>Show as tables</summary>
      {open && (
        <>
          <h3 id="tl-signals">Signals</h3>
          <div class="scroll" tabIndex={0} role="region" aria-labelledby="tl-signals">
            <table>
              <thead><tr><th scope="col">Signal</th><th scope="col">Threshold</th><th scope="col">Peak</th><th scope="col">Active for</th><th scope="col">Quiet for</th><th scope="col">Unknown for</th></tr></thead>
              <tbody>{t.signals.map((s) => <tr key={s.signal}><th scope="row">{s.signal}</th><td>{s.unit ? figure(s.threshold, s.unit) : '–'}</td><td>{s.unit ? figure(Math.max(0, ...s.points.map((q) => q.value ?? 0)), s.unit) : '–'}</td><td>{span(sum(s.points, 'active'))}</td><td>{span(sum(s.points, 'quiet'))}</td><td>{span(sum(s.points, 'unknown'))}</td></tr>)}</tbody>
            </table>
          </div>
          <h3 id="tl-changes">Pauses and resumes</h3>
          {t.changes.length === 0 ? <p class="muted">None.</p> : (
            <ul class="blocks">{[...t.changes].reverse().slice(0, 100).map((c, i) => <li key={i}>{clock(c.at, now)}: {c.from && `${words(c.from).toLowerCase()} to `}{words(c.to).toLowerCase()}{c.by && ` by ${c.by}`}{c.reason && ` (${words(c.reason)})`}</li>)}</ul>
          )}
          <h3 id="tl-states">States, newest first</h3>
          <div class="scroll" tabIndex={0} role="region" aria-labelledby="tl-states">
            <table>
              <thead><tr><th scope="col">From</th><th scope="col">To</th><th scope="col">State</th><th scope="col">Explanation</th></tr></thead>
              <tbody>{rows.map((b) => <tr key={b.from}><td class="nowrap">{clock(b.from, now)}</td><td class="nowrap">{clock(b.to, now)}</td><td>{called[b.kind]}</td><td class="muted">{local(b.said, now)}</td></tr>)}</tbody>
            </table>
          </div>
        </>
      )}
    </details>
  )
}

/** A form that asks for a past time. */
export function LookBack(p: { onPick: (at: number) => void }) {
  const [text, setText] = useState('')
  const [fault, setFault] = useState('')
  useEffect(() => setFault(''), [text])
  const send = (e: Event) => {
    e.preventDefault()
    const time = new Date(text).getTime()
    if (Number.isNaN(time)) setFault('Enter a date and time.')
    else if (time > Date.now()) setFault('This time is in the future.')
    else p.onPick(time)
  }
  return (
    <form class="lookback" onSubmit={send}>
      <label for="at">Explain the state at</label>{' '}
      <input id="at" type="datetime-local" value={text} onInput={(e) => setText(e.currentTarget.value)} aria-invalid={fault ? true : undefined} aria-describedby={fault ? 'at-fault' : undefined} />{' '}
      <button type="submit">Explain</button>
      {fault && <span id="at-fault" class="bad" role="alert"> {fault}</span>}
    </form>
  )
}
