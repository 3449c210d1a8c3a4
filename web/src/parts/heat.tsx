// Where idle time is: workers by the hours of a week.

import { useEffect, useRef, useState } from 'preact/hooks'
import { hours } from '../evidence'
import { onTheme } from '../theme'
import { useWidth } from './ui'

export interface HeatRow { key: string; name: string; href?: string; hours: number[] } // by hour of the week from Sunday

const days = ['Monday', 'Tuesday', 'Wednesday', 'Thursday', 'Friday', 'Saturday', 'Sunday']
const rowHeight = 22

/** The hour of the week, from Sunday, of a column from Monday. */
const hourOf = (column: number) => (column + 24) % 168

export function HeatMap(p: { rows: HeatRow[] }) {
  const box = useRef<HTMLDivElement>(null), canvas = useRef<HTMLCanvasElement>(null)
  const width = useWidth(box)
  const [, redraw] = useState(0)
  const [at, setAt] = useState<{ row: number; column: number } | null>(null)
  useEffect(() => onTheme(() => redraw((n) => n + 1)), [])
  useEffect(() => {
    const scheme = matchMedia('(prefers-color-scheme: dark)')
    const changed = () => redraw((n) => n + 1)
    scheme.addEventListener('change', changed)
    return () => scheme.removeEventListener('change', changed)
  }, [])
  const most = Math.max(...p.rows.map((r) => Math.max(...r.hours)), 1e-9)
  useEffect(() => {
    const c = canvas.current, draw = c?.getContext('2d')
    if (!c || !draw || width === 0) return
    const scale = devicePixelRatio || 1
    c.width = width * scale
    c.height = p.rows.length * rowHeight * scale
    draw.scale(scale, scale)
    const style = getComputedStyle(c)
    const back = style.getPropertyValue('background-color'), hot = style.getPropertyValue('color')
    const cell = width / 168
    p.rows.forEach((r, y) => {
      for (let x = 0; x < 168; x++) {
        const share = (r.hours[hourOf(x)] ?? 0) / most
        draw.globalAlpha = 1
        draw.fillStyle = back
        draw.fillRect(x * cell, y * rowHeight, cell + 0.5, rowHeight - 2)
        if (share <= 0) continue
        draw.globalAlpha = 0.18 + 0.82 * share
        draw.fillStyle = hot
        draw.fillRect(x * cell, y * rowHeight, cell + 0.5, rowHeight - 2)
      }
    })
  })
  const move = (e: PointerEvent) => {
    const b = canvas.current!.getBoundingClientRect()
    setAt({ row: Math.min(p.rows.length - 1, Math.max(0, Math.floor((e.clientY - b.top) / rowHeight))), column: Math.min(167, Math.max(0, Math.floor(((e.clientX - b.left) / b.width) * 168))) })
  }
  const said = at && p.rows[at.row] ? `${p.rows[at.row]!.name}, ${days[Math.floor(at.column / 24)]} ${String(at.column % 24).padStart(2, '0')}:00: ${hours(p.rows[at.row]!.hours[hourOf(at.column)] ?? 0)} idle` : 'Darker is more idle time.'
  const sum = (r: HeatRow) => r.hours.reduce((a, b) => a + b, 0)
  return (
    <>
      <div class="heatmap">
        <div class="heatnames">{p.rows.map((r) => <div key={r.key} style={{ height: `${rowHeight}px` }}>{r.href ? <a href={r.href}>{r.name}</a> : r.name}</div>)}</div>
        <div ref={box} class="heatcells" onPointerMove={move} onPointerLeave={() => setAt(null)}>
          <canvas ref={canvas} aria-hidden="true" style={{ width: '100%', height: `${p.rows.length * rowHeight}px` }} />
          <div class="heatdays" aria-hidden="true">{days.map((d) => <span key={d}>{d.slice(0, 3)}</span>)}</div>
        </div>
        <div class="heatsums" aria-hidden="true">{p.rows.map((r) => <div key={r.key} style={{ height: `${rowHeight}px` }}>{hours(sum(r))}</div>)}</div>
      </div>
      <p class="muted small">{said}</p>
      <details>
        <summary>As a table</summary>
        <div class="scroll" tabIndex={0} role="region" aria-label="Idle hours by worker and day">
          <table class="numbers">
            <thead><tr><th scope="col">Worker</th>{days.map((d) => <th key={d} scope="col">{d.slice(0, 3)}</th>)}<th scope="col">Week</th></tr></thead>
            <tbody>{p.rows.map((r) => <tr key={r.key}><th scope="row">{r.name}</th>{days.map((d, n) => <td key={d}>{hours(Array.from({ length: 24 }, (_, h) => r.hours[hourOf(n * 24 + h)] ?? 0).reduce((a, b) => a + b, 0))}</td>)}<td>{hours(sum(r))}</td></tr>)}</tbody>
          </table>
        </div>
      </details>
    </>
  )
}
