// Schedules: the hours in which workers run.

import { useState } from 'preact/hooks'
import { ask, Entry, List } from '../api'
import type { PageProps } from '../router'
import { useResource } from '../resource'
import { Boundaries, Schedule, ScheduleWindow } from '../rules'
import { attempt, Button, Card, Empty, Fault, Loading, Time } from '../parts/ui'
import { CheckField, DurationField, Field, TextField } from '../parts/fields'
import { durationOf, Form, text } from '../parts/form'
import { dayNames, daysOf, emptyWeek, hoursOf, paint, WeekCells, WeekGrid } from '../parts/weekgrid'
import { Apply } from '../parts/rules'

const mine = (e: Entry) => e.action.startsWith('schedule_')

export function Schedules(p: PageProps) {
  const all = useResource<List<Schedule>>('/schedules?limit=1000', { on: mine })
  const [editing, setEditing] = useState<Schedule | 'new' | null>(null)
  const [applying, setApplying] = useState<Schedule | null>(null)
  const admin = p.role === 'admin'
  return (
    <>
      <h1>Schedules</h1>
      <p class="headline">The hours during which workers run. Outside these hours, lull pauses quiet workers. Workers in use are paused only if their policy forces it.</p>
      {admin && <div class="actions commands"><Button kind="primary" onClick={() => setEditing('new')}>New schedule</Button></div>}
      {all.problem && <Fault problem={all.problem} retry={all.reload} />}
      {!all.value ? !all.problem && <Loading what="the schedules" /> : all.value.items.length === 0 ? <Empty title="No schedules yet">For example, office hours: Monday to Friday, 08:00 to 18:00.</Empty> : all.value.items.map((s) => (
        <Card key={s.name} title={s.name} aside={<span>
          {admin && <Button kind="plain" label={`Apply ${s.name}`} onClick={() => setApplying(s)}>Apply</Button>}{' '}
          {admin && <Button kind="plain" label={`Edit ${s.name}`} onClick={() => setEditing(s)}>Edit</Button>}{' '}
          {admin && <Button kind="plain" label={`Remove ${s.name}`} onClick={() => attempt(`Removed ${s.name}.`, () => ask('DELETE', `/schedules/${encodeURIComponent(s.name)}`)).then(all.reload)}>Remove</Button>}
        </span>}>
          {s.description && <p>{s.description}</p>}
          <Next name={s.name} />
          <Week s={s} />
          <Dates s={s} />
          <p class="muted small">{s.zone}. {s.start ? 'Workers resume when it opens.' : 'Workers are not resumed automatically.'} Outside open hours, workers pause when quiet for {s.grace_minutes ?? usualGrace} min. {(s.holidays ?? []).length > 0 && `Holidays: ${s.holidays!.join(', ')}.`}</p>
        </Card>
      ))}
      {editing && <Edit was={editing === 'new' ? null : editing} onClose={() => { setEditing(null); all.reload() }} />}
      {applying && <Apply what="schedule" name={applying.name} text={applying.windows.map((w) => `${w.days ?? w.date ?? ''} ${w.from} to ${w.to}`).join(', ')} onClose={() => setApplying(null)} />}
    </>
  )
}

function Next(p: { name: string }) {
  const b = useResource<Boundaries>(`/schedules/${encodeURIComponent(p.name)}/boundaries?limit=1`, { on: mine, every: 60_000 })
  if (!b.value) return null
  const next = b.value.items?.[0]
  return <p><span class={`state ${b.value.open ? 'active' : 'quiet'}`}>{b.value.open ? 'Open now' : 'Closed now'}</span>{next && <>, {next.opens ? 'opens' : 'closes'} <Time at={next.at} /></>}</p>
}

/** Quiet minutes before a pause where a schedule does not say (policy.DefaultGrace). */
const usualGrace = 15

/** One-time windows, and the legend of the week. */
function Dates(p: { s: Schedule }) {
  const dated = p.s.windows.filter((w) => w.date).sort((a, b) => a.date! < b.date! ? -1 : 1)
  return (
    <>
      {p.s.windows.some((w) => w.hold) && <p class="hours muted small"><span class="swatch" /> open <span class="swatch hold" /> hold: open, nothing is paused (maintenance)</p>}
      {dated.length > 0 && <ul class="history dates" aria-label="One-time windows">{dated.map((w, i) => (
        <li key={i}><span><strong>{w.date}</strong> {w.from} to {w.to}{w.to <= w.from && ' of the next day'}</span><span class="muted small">{w.hold ? 'hold: nothing is paused (maintenance)' : 'open'}{w.name && `, ${w.name}`}</span></li>
      ))}</ul>}
    </>
  )
}

/** The week of a schedule, as a picture with a text alternative. */
function Week(p: { s: Schedule }) {
  const hour = (t: string) => { const [h, m] = t.split(':'); return Number(h) + Number(m ?? 0) / 60 }
  const bars: { day: number; from: number; to: number; hold: boolean }[] = []
  for (const w of p.s.windows) {
    for (const day of daysOf(w.days)) {
      const from = hour(w.from), to = hour(w.to)
      if (to > from) bars.push({ day, from, to, hold: !!w.hold })
      else { bars.push({ day, from, to: 24, hold: !!w.hold }); if (to > 0) bars.push({ day: (day + 1) % 7, from: 0, to, hold: !!w.hold }) }
    }
  }
  const words = p.s.windows.map((w) => `${w.days ?? w.date ?? ''} from ${w.from} to ${w.to}${w.hold ? ' (held)' : ''}`).join('; ')
  return (
    <svg class="week" viewBox="0 0 800 170" role="img" aria-label={`Open ${words}`}>
      {[0, 6, 12, 18, 24].map((h) => <g key={h}><line x1={50 + h * 30} x2={50 + h * 30} y1="4" y2="146" /><text x={50 + h * 30} y="164" text-anchor="middle">{String(h).padStart(2, '0')}:00</text></g>)}
      {dayNames.map((d, i) => <g key={d}><text x="40" y={17 + i * 20} text-anchor="end">{d[0]!.toUpperCase() + d.slice(1)}</text><rect class="day" x="50" y={5 + i * 20} width="720" height="16" rx="4" /></g>)}
      {bars.map((b, i) => <rect key={i} class={b.hold ? 'bar hold' : 'bar'} x={50 + b.from * 30} y={5 + b.day * 20} width={(b.to - b.from) * 30} height="16" rx="4" />)}
    </svg>
  )
}

/** Splits windows into those that a week of half hours shows, and the others as lines. */
function split(windows: ScheduleWindow[]): { week: WeekCells; lines: string } {
  const week = emptyWeek()
  const others = windows.filter((w) => w.hold || w.name || w.date || w.on_holidays || !paint(week, { days: w.days ?? '', from: w.from, to: w.to }))
  return { week, lines: others.map((w) => `${w.days ?? w.date} ${w.from}-${w.to}${w.hold ? ' hold' : ''}`).join('\n') }
}

function Edit(p: { was: Schedule | null; onClose: () => void }) {
  const { was } = p
  const [first] = useState(() => split(was?.windows ?? [{ days: 'mon-fri', from: '08:00', to: '18:00' }]))
  const [week, setWeek] = useState(first.week)
  const send = async (f: FormData) => {
    const name = was?.name ?? text(f, 'name')
    const all = week.map((cells) => [...cells])
    const others: ScheduleWindow[] = []
    for (const l of text(f, 'windows').split('\n').map((l) => l.trim()).filter(Boolean)) {
      const m = /^(\S+)\s+([0-9:]+)\s*-\s*([0-9:]+)(\s+hold)?$/.exec(l)
      if (!m) throw new Error(`Invalid window "${l}". Use days and hours, such as mon-fri 08:00-18:00.`)
      const old = was?.windows.find((w) => (w.days ?? w.date) === m[1] && w.from === m[2] && w.to === m[3])
      const w = { ...old, ...(/^\d{4}-/.test(m[1]!) ? { date: m[1] } : { days: m[1] }), from: m[2]!, to: m[3]!, hold: !!m[4] }
      if (w.hold || w.date || w.name || w.on_holidays || !paint(all, { days: w.days ?? '', from: w.from, to: w.to })) others.push(w)
    }
    const windows = [...hoursOf(all), ...others]
    const body: Record<string, unknown> = { name, description: text(f, 'description'), zone: text(f, 'zone'), windows, holidays: text(f, 'holidays').split(',').map((h) => h.trim()).filter(Boolean), start: !!f.get('start') }
    const grace = durationOf(f, 'grace', 'Grace')
    if (grace !== undefined) body.grace_minutes = grace
    await ask('PUT', `/schedules/${encodeURIComponent(name)}`, body)
    return `Saved ${name}. It takes effect at its next boundary.`
  }
  return (
    <Form title={was ? `Edit ${was.name}` : 'New schedule'} submit="Save" wide onClose={p.onClose} send={send}>
      <div class="pair">
        {!was && <TextField id="s-name" name="name" label="Name" required max={64} />}
        <TextField id="s-zone" name="zone" label="Time zone" required max={64} value={was?.zone ?? Intl.DateTimeFormat().resolvedOptions().timeZone} list={Intl.supportedValuesOf('timeZone')} />
        <TextField id="s-description" name="description" label="Description" max={1024} value={was?.description} />
      </div>
      <WeekGrid value={week} onChange={setWeek} />
      <details open={first.lines !== ''}>
        <summary>One-time windows, exact times, maintenance and holidays</summary>
        <div class="stack">
          <Field id="s-windows" label="Other windows" note={<>One per line: days or a date, then hours. Add <code>hold</code> to keep everything running for maintenance.</>}>
            <textarea id="s-windows" name="windows" rows={3} defaultValue={first.lines} placeholder={'2026-11-25 22:00-06:00 hold'} aria-describedby="s-windows-note" />
          </Field>
          <TextField id="s-holidays" name="holidays" label="Holidays" max={2048} value={(was?.holidays ?? []).join(', ')} note="Closed days, such as 12-25, 2026-04-03" />
        </div>
      </details>
      <DurationField id="s-grace" name="grace" label="Outside open hours, pause when quiet for" minutes={was?.grace_minutes} inherit={`${usualGrace} min`} />
      <CheckField name="start" checked={was?.start}>Resume workers when it opens</CheckField>
    </Form>
  )
}
