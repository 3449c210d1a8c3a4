// Where idle time is: what workers did in each hour of the week. Every kind has a
// shape of its own beside its color.

import { useLayoutEffect, useRef, useState } from 'preact/hooks'
import { hours, IdlePattern, usd } from '../evidence'
import { useTheme } from '../theme'
import { useWidth } from './ui'

const days = ['Monday', 'Tuesday', 'Wednesday', 'Thursday', 'Friday', 'Saturday', 'Sunday']
const rowHeight = 24
const first = 15

/** The kinds of time, in the order in which a cell stacks them, and their letters in data-cells. */
const kinds = [
  { key: 'idle_by_hour_of_week', name: 'Idle', letter: 'i' },
  { key: 'in_use_by_hour_of_week', name: 'In use', letter: 'u' },
  { key: 'unknown_by_hour_of_week', name: 'Unknown', letter: '?' },
  { key: 'stopped_by_hour_of_week', name: 'Stopped', letter: 's' },
] as const

/** The hours of each kind in n hours of the week, from Monday. */
function cell(r: IdlePattern, column: number, n: number): number[] {
  return kinds.map((k) => {
    let sum = 0
    for (let h = 0; h < n; h++) sum += r[k.key][(column * n + h + 24) % 168] ?? 0
    return sum
  })
}

const sum = (list: number[]) => list.reduce((a, b) => a + b, 0)

/** The letter of what a cell mostly is; a space if it has no hours. */
function letter(parts: number[]): string {
  const most = Math.max(...parts)
  return most <= 0 ? ' ' : kinds[parts.indexOf(most)]!.letter
}

const href = (r: IdlePattern) => `/workers/${encodeURIComponent(r.key)}`

/** What the idle hours of a row cost; a lower bound if some have no price. */
const cost = (r: IdlePattern) => r.idle_usd === null ? 'no price' : `${r.unpriced_idle_hours > 0 ? 'at least ' : ''}${usd(r.idle_usd)}`

export function HeatMap(p: { rows: IdlePattern[]; groups: number }) {
  const box = useRef<HTMLDivElement>(null), canvas = useRef<HTMLCanvasElement>(null)
  const width = useWidth(box)
  const theme = useTheme()
  const [many, setMany] = useState(first)
  const [at, setAt] = useState<{ row: number; column: number } | null>(null)
  const rows = p.rows.slice(0, many)
  const each = [1, 2, 3, 4, 6, 8, 12, 24].find((n) => width / (168 / n) >= 5) ?? 24 // hours in a column
  const columns = 168 / each
  useLayoutEffect(() => {
    const c = canvas.current, d = c?.getContext('2d')
    if (!c || !d || width === 0) return
    const scale = devicePixelRatio || 1
    c.width = width * scale
    c.height = rows.length * rowHeight * scale
    d.scale(scale, scale)
    paint(d, c, rows, width / columns, each)
  }, [width, theme, p.rows, many])
  const move = (e: PointerEvent) => {
    const b = canvas.current!.getBoundingClientRect()
    setAt({ row: Math.min(rows.length - 1, Math.max(0, Math.floor((e.clientY - b.top) / rowHeight))), column: Math.min(columns - 1, Math.max(0, Math.floor(((e.clientX - b.left) / b.width) * columns))) })
  }
  const keys = (e: KeyboardEvent) => {
    const now = at ?? { row: 0, column: 0 }
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [0, -24 / each], PageDown: [0, 24 / each], Home: [0, -columns], End: [0, columns] }[e.key]
    if (!by) return
    e.preventDefault()
    setAt(at ? { row: Math.min(rows.length - 1, Math.max(0, now.row + by[0]!)), column: Math.min(columns - 1, Math.max(0, now.column + by[1]!)) } : now)
  }
  const two = (h: number) => String(h).padStart(2, '0')
  const said = (c: { row: number; column: number }) => {
    const r = rows[c.row]!, parts = cell(r, c.column, each), h = (c.column * each) % 24
    const idle = parts[0]!, all = sum(r.idle_by_hour_of_week)
    const money = idle > 0 && r.idle_usd !== null && r.unpriced_idle_hours === 0 ? ` (${usd((r.idle_usd * idle) / all)})` : ''
    const list = kinds.flatMap((k, i) => (parts[i]! > 0.005 ? [`${k.name.toLowerCase()} ${hours(parts[i]!)}${i === 0 ? money : ''}`] : []))
    return `${r.name || r.key}, ${days[Math.floor((c.column * each) / 24)]} ${each === 24 ? '' : `${two(h)}:00${each > 1 ? ` to ${two(h + each)}:00` : ''}`}: ${list.join(', ') || 'no data'}`
  }
  const priced = p.rows.filter((r) => r.idle_usd !== null)
  const total = priced.reduce((n, r) => n + r.idle_usd!, 0)
  return (
    <>
      {priced.length > 0 && <p class="small" data-idle-usd={total.toFixed(2)}><strong>{p.groups > p.rows.length || p.rows.some((r) => r.unpriced_idle_hours > 0) ? 'At least ' : ''}{usd(total)}</strong> spent on idle compute{p.groups > p.rows.length && <> by the costliest {p.rows.length.toLocaleString('en')} of {p.groups.toLocaleString('en')} workers</>}.</p>}
      <ul class="legend" aria-hidden="true">{kinds.map((k) => <li key={k.letter}><span class={`cellkey ${k.name.toLowerCase().replace(' ', '')}`} />{k.name}</li>)}</ul>
      <div class="heatmap">
        <div class="heatnames">{rows.map((r) => <div key={r.key} style={{ height: `${rowHeight}px` }}><a href={href(r)} title={r.name || r.key}>{r.name || r.key}</a></div>)}</div>
        <div ref={box} class="heatcells" role="slider" tabIndex={0} aria-label="Idle time by worker and hour of the week. Left and right change the hour, up and down the worker." aria-orientation="horizontal" aria-valuemin={0} aria-valuemax={columns - 1} aria-valuenow={at?.column ?? 0} aria-valuetext={rows.length > 0 ? said(at ?? { row: 0, column: 0 }) : ''}
          onPointerMove={move} onPointerLeave={() => setAt(null)} onBlur={() => setAt(null)} onKeyDown={keys}>
          <canvas ref={canvas} aria-hidden="true" style={{ width: '100%', height: `${rows.length * rowHeight}px` }} data-rows={rows.length} />
          {at && <span class="heatcursor" style={{ left: `${(at.column / columns) * 100}%`, top: `${at.row * rowHeight}px`, width: `${100 / columns}%`, height: `${rowHeight - 4}px` }} />}
          <div class="heatdays" aria-hidden="true">{days.map((d) => <span key={d}>{d.slice(0, 3)}</span>)}</div>
        </div>
        <div class="heatsums">{rows.map((r) => <div key={r.key} data-heat={r.key} data-usd={r.idle_usd ?? ''} data-cells={Array.from({ length: 168 }, (_, h) => letter(cell(r, h, 1))).join('')} style={{ height: `${rowHeight}px` }}><strong>{cost(r)}</strong> <span class="muted">{hours(sum(r.idle_by_hour_of_week))}</span></div>)}</div>
      </div>
      <p class="muted small heatsaid" aria-hidden="true">{at && rows[at.row] ? said(at) : 'Point at a cell, or use the arrow keys, to see its hours.'}</p>
      {p.rows.length > many && <div class="actions more"><button type="button" onClick={() => setMany(many + 25)}>Show {Math.min(25, p.rows.length - many)} more</button></div>}
      <details>
        <summary>Show as table</summary>
        <div class="scroll" tabIndex={0} role="region" aria-label="Idle hours by worker and day">
          <table class="numbers">
            <thead><tr><th scope="col">Worker</th>{days.map((d) => <th key={d} scope="col">{d.slice(0, 3)}</th>)}<th scope="col">Idle</th><th scope="col">In use</th><th scope="col">Cost of idle time</th></tr></thead>
            <tbody>{rows.map((r) => <tr key={r.key}><th scope="row">{r.name || r.key}</th>{days.map((d, n) => <td key={d}>{hours(cell(r, n, 24)[0]!)}</td>)}<td>{hours(sum(r.idle_by_hour_of_week))}</td><td>{hours(sum(r.in_use_by_hour_of_week))}</td><td>{cost(r)}</td></tr>)}</tbody>
          </table>
        </div>
      </details>
    </>
  )
}

/** Draws the cells: idle is a solid block, use a narrow bar, unknown hatched, stopped a line. */
function paint(d: CanvasRenderingContext2D, c: HTMLCanvasElement, rows: IdlePattern[], width: number, each: number) {
  const style = getComputedStyle(c)
  const [back, idle, used, unknown, line] = ['--raised', '--heat-idle', '--heat-used', '--heat-unknown', '--muted'].map((name) => { c.style.color = `var(${name})`; return style.color })
  c.style.color = ''
  const full = rowHeight - 4
  rows.forEach((r, y) => {
    const bottom = y * rowHeight + full
    d.fillStyle = back!
    d.fillRect(0, y * rowHeight, width * (168 / each), full)
    for (let x = 0; x < 168 / each; x++) {
      const parts = cell(r, x, each), all = sum(parts)
      if (all <= 0) continue
      const left = x * width
      let at = bottom
      const block = (share: number, inset: number, fill: string) => {
        const height = (share / all) * full
        d.fillStyle = fill
        if (height > 0.5) d.fillRect(left + width * inset, at - height, Math.max(1, width * (1 - 2 * inset) - (inset === 0 ? 0.4 : 0)), height)
        at -= height
      }
      block(parts[0]!, 0, idle!)
      block(parts[1]!, 0.3, used!)
      const hatch = (parts[2]! / all) * full
      d.fillStyle = unknown!
      for (let h = 0; h + 1.5 <= hatch; h += 4) d.fillRect(left, at - h - 1.5, width, 1.5)
      at -= hatch
      if (parts[3]! / all > 0.5) { d.fillStyle = line!; d.fillRect(left + width * 0.3, bottom - 1.5, Math.max(1, width * 0.4), 1.5) }
    }
  })
}
