// Editor for the open hours of a schedule, in half hours.

import { useRef, useState } from 'preact/hooks'

export interface Hours { days: string; from: string; to: string }

export const dayNames = ['mon', 'tue', 'wed', 'thu', 'fri', 'sat', 'sun']

const slots = 48

export type WeekCells = boolean[][] // by day from Monday, and half hour

export const emptyWeek = (): WeekCells => Array.from({ length: 7 }, () => Array<boolean>(slots).fill(false))

const clockOf = (slot: number) => `${String(Math.floor((slot % slots) / 2)).padStart(2, '0')}:${slot % 2 ? '30' : '00'}`

/** The half hour of "08:30"; null if it is between two. */
function slotOf(t: string): number | null {
  const m = /^(\d{1,2}):(00|30)$/.exec(t)
  return m && Number(m[1]) <= 24 ? Number(m[1]) * 2 + (m[2] === '30' ? 1 : 0) : null
}

/** Which days "mon-fri,sun" names, by number from Monday. */
export function daysOf(text: string | undefined): number[] {
  const out: number[] = []
  for (const part of (text ?? '').toLowerCase().split(',').map((p) => p.trim())) {
    if (part === 'daily' || part === 'all') return [0, 1, 2, 3, 4, 5, 6]
    const [from = '', to = from] = part.split('-').map((d) => d.trim().slice(0, 3))
    const a = dayNames.indexOf(from), b = dayNames.indexOf(to)
    if (a < 0 || b < 0) continue
    for (let d = a; ; d = (d + 1) % 7) {
      out.push(d)
      if (d === b) break
    }
  }
  return out
}

/** Paints hours into a week. Reports whether they are on half hours, so that they fit. */
export function paint(week: WeekCells, h: Hours): boolean {
  const from = slotOf(h.from), to = slotOf(h.to), days = daysOf(h.days)
  if (from === null || to === null || days.length === 0) return false
  for (const d of days) {
    const end = to > from ? to : to + slots
    for (let s = from; s < end; s++) week[(d + Math.floor(s / slots)) % 7]![s % slots] = true
  }
  return true
}

/** The hours of a week, days that are alike together: "mon-fri 08:00-18:00". */
export function hoursOf(week: WeekCells): Hours[] {
  const byRange = new Map<string, number[]>()
  week.forEach((cells, day) => {
    for (let s = 0; s < slots; s++) {
      if (!cells[s] || (s > 0 && cells[s - 1])) continue
      let end = s
      while (end < slots && cells[end]) end++
      const key = `${clockOf(s)} ${end === slots ? '24:00' : clockOf(end)}`
      byRange.set(key, [...(byRange.get(key) ?? []), day])
    }
  })
  return [...byRange].map(([key, days]) => {
    const [from = '', to = ''] = key.split(' ')
    const runs: string[] = []
    for (let i = 0; i < days.length;) {
      let j = i
      while (j + 1 < days.length && days[j + 1] === days[j]! + 1) j++
      runs.push(i === j ? dayNames[days[i]!]! : `${dayNames[days[i]!]}-${dayNames[days[j]!]}`)
      i = j + 1
    }
    return { days: runs.join(','), from, to }
  })
}

const title = (d: number) => dayNames[d]!.replace(/^./, (c) => c.toUpperCase())

/** A grid with one tab stop: arrows move, Space toggles, Shift+arrow paints. */
export function WeekGrid(p: { value: WeekCells; onChange: (w: WeekCells) => void }) {
  const [at, setAt] = useState({ day: 0, slot: 16 })
  const painting = useRef<boolean | null>(null)
  const box = useRef<HTMLDivElement>(null)
  const set = (day: number, slot: number, on: boolean) => {
    if (p.value[day]![slot] === on) return
    p.onChange(p.value.map((cells, d) => (d === day ? cells.map((c, s) => (s === slot ? on : c)) : cells)))
  }
  const cellAt = (e: PointerEvent) => {
    const el = document.elementFromPoint(e.clientX, e.clientY)?.closest<HTMLElement>('[data-slot]')
    return el && box.current!.contains(el) ? { day: Number(el.dataset.day), slot: Number(el.dataset.slot) } : null
  }
  const down = (e: PointerEvent) => {
    const c = cellAt(e)
    if (!c) return
    painting.current = !p.value[c.day]![c.slot]
    setAt(c)
    set(c.day, c.slot, painting.current)
  }
  const move = (e: PointerEvent) => {
    const c = painting.current === null ? null : cellAt(e)
    if (c) set(c.day, c.slot, painting.current!)
  }
  const keys = (e: KeyboardEvent) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[e.key]
    if (e.key === ' ' || e.key === 'Enter') {
      e.preventDefault()
      set(at.day, at.slot, !p.value[at.day]![at.slot])
    }
    if (!step) return
    e.preventDefault()
    const next = { day: Math.max(0, Math.min(6, at.day + step[0]!)), slot: Math.max(0, Math.min(slots - 1, at.slot + step[1]!)) }
    if (e.shiftKey) set(next.day, next.slot, p.value[at.day]![at.slot]!)
    setAt(next)
    requestAnimationFrame(() => box.current?.querySelector<HTMLElement>('[tabindex="0"]')?.focus())
  }
  const presets: [string, Hours[]][] = [['Office hours', [{ days: 'mon-fri', from: '08:00', to: '18:00' }]], ['Weekdays', [{ days: 'mon-fri', from: '00:00', to: '24:00' }]], ['Clear', []]]
  const said = hoursOf(p.value)
  return (
    <div>
      <div class="presets">{presets.map(([label, list]) => <button key={label} type="button" onClick={() => { const w = emptyWeek(); for (const h of list) paint(w, h); p.onChange(w) }}>{label}</button>)}<span class="muted small">Drag to mark the hours during which workers run.</span></div>
      <div ref={box} class="weekgrid" role="grid" aria-label="Open hours by day" onPointerDown={down} onPointerMove={move} onPointerUp={() => { painting.current = null }} onPointerLeave={() => { painting.current = null }} onKeyDown={keys}>
        {p.value.map((cells, d) => (
          <div key={d} role="row">
            <span role="rowheader">{title(d)}</span>
            {cells.map((on, s) => <span key={s} role="gridcell" data-day={d} data-slot={s} tabIndex={at.day === d && at.slot === s ? 0 : -1} class={on ? 'on' : ''} aria-selected={on} aria-label={`${title(d)} ${clockOf(s)}, ${on ? 'open' : 'closed'}`} />)}
          </div>
        ))}
        <div class="hoursrow" aria-hidden="true"><span />{[0, 6, 12, 18].map((h) => <span key={h}>{String(h).padStart(2, '0')}:00</span>)}</div>
      </div>
      <p class="muted small" role="status">{said.length === 0 ? 'Closed all week.' : `Open ${said.map((h) => `${h.days} ${h.from} to ${h.to}`).join('; ')}.`}</p>
    </div>
  )
}
