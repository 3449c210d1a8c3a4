// A chart of values over time. Time without a value is hatched, and no line is
// drawn over it: unknown is not zero.

import { ComponentChildren } from 'preact'
import { useLayoutEffect, useMemo, useRef, useState } from 'preact/hooks'
import uPlot from 'uplot'
import 'uplot/dist/uPlot.min.css'
import { useTheme } from '../theme'
import { clock } from '../time'
import { useWidth } from './ui'

/** A value that held from at to until, in milliseconds; null is unknown. */
export interface Span { at: number; until: number; value: number | null }

export interface Series { name: string; spans: Span[] }

interface Props {
  name: string
  from: number
  to: number
  series: Series[]
  format: (v: number) => string
  /** The same for the axis, where it must be short. */
  axis?: (v: number) => string
  /** Draws separate bars instead of steps. */
  bars?: boolean
  /** A dashed line. */
  threshold?: number
  /** The upper end of the axis, at least. */
  top?: number
  /** Times without values that are known to have none, such as while stopped. */
  off?: { at: number; until: number }[]
  /** What is said of such a time. */
  offText?: string
  aside?: ComponentChildren
}

const height = 150

/** The values of a series as uPlot draws them: steps, and null where there is none. */
function steps(spans: Span[], bars: boolean): [number[], (number | null)[]] {
  const x: number[] = [], y: (number | null)[] = []
  spans.forEach((s, i) => {
    if (s.value === null) return
    const pad = bars ? (s.until - s.at) * 0.12 : 0
    x.push((s.at + pad) / 1000, (s.until - pad) / 1000 - 0.001)
    y.push(s.value, s.value)
    const next = spans[i + 1]
    if (bars || !next || next.value === null || next.at - s.until > 1000) { x.push(s.until / 1000 - 0.0005); y.push(null) }
  })
  return [x, y]
}

/** The times of a range that no span with a value covers. */
function without(spans: { at: number; until: number }[], from: number, to: number) {
  const out: { at: number; until: number }[] = []
  let at = from
  for (const s of [...spans].sort((a, b) => a.at - b.at)) {
    if (s.at - at > 1000) out.push({ at, until: Math.min(s.at, to) })
    at = Math.max(at, s.until)
  }
  if (to - at > 1000) out.push({ at, until: to })
  return out
}

export function Chart(p: Props) {
  const box = useRef<HTMLDivElement>(null), plot = useRef<uPlot | null>(null)
  const width = useWidth(box)
  const theme = useTheme()
  const [at, setAt] = useState<number | null>(null)
  const known = useMemo(() => p.series.flatMap((s) => s.spans.filter((q) => q.value !== null)), [p.series])
  const off = p.off ?? []
  const gaps = useMemo(() => without([...known, ...off], p.from, p.to), [known, p.off, p.from, p.to])
  const most = Math.max(p.top ?? 0, p.threshold ?? 0, ...known.map((s) => s.value!)) || 1
  useLayoutEffect(() => {
    const el = box.current
    if (!el || width === 0) return
    const line = probe(el, '--line'), muted = probe(el, '--muted')
    const inks = [probe(el, '--accent'), probe(el, '--warn')]
    const font = `11.5px ${getComputedStyle(el).fontFamily}`
    const area = (u: uPlot, a: number, b: number, fill: string | CanvasPattern) => {
      const x0 = u.valToPos(Math.max(a, p.from) / 1000, 'x', true), x1 = u.valToPos(Math.min(b, p.to) / 1000, 'x', true)
      u.ctx.fillStyle = fill
      u.ctx.fillRect(x0, u.bbox.top, Math.max(1, x1 - x0), u.bbox.height)
    }
    const u = new uPlot({
      width, height,
      padding: [8, 8, 0, 0],
      legend: { show: false },
      cursor: { x: true, y: false, points: { show: false }, drag: { x: false, y: false } },
      scales: { x: { time: true, range: [p.from / 1000, p.to / 1000] }, y: { range: [0, most * 1.08] } },
      axes: [
        { font, stroke: muted, grid: { stroke: line, width: 1 }, ticks: { show: false }, space: p.bars ? 72 : 58, size: 26, values: (_, splits) => splits.map(label) },
        { font, stroke: muted, grid: { stroke: line, width: 1 }, ticks: { show: false }, size: 58, space: 30, values: (_, splits) => splits.map((v) => (p.axis ?? p.format)(v)) },
      ],
      series: [{}, ...p.series.map((s, i) => ({ label: s.name, stroke: inks[i % inks.length], width: 1.5, fill: fade(inks[i % inks.length]!), points: { show: false } }))],
      hooks: {
        drawClear: [(u) => {
          const hatch = hatched(u.ctx, probe(el, '--hatchback'), probe(el, '--hatch'))
          for (const g of gaps) area(u, g.at, g.until, hatch)
          for (const g of off) area(u, g.at, g.until, probe(el, '--still'))
        }],
        draw: [(u) => {
          if (!p.threshold) return
          const y = u.valToPos(p.threshold, 'y', true)
          u.ctx.save()
          u.ctx.strokeStyle = probe(el, '--bad')
          u.ctx.lineWidth = devicePixelRatio
          u.ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio])
          u.ctx.beginPath()
          u.ctx.moveTo(u.bbox.left, y)
          u.ctx.lineTo(u.bbox.left + u.bbox.width, y)
          u.ctx.stroke()
          u.ctx.restore()
        }],
        setCursor: [(u) => setAt(u.cursor.left !== undefined && u.cursor.left! >= 0 ? u.posToVal(u.cursor.left!, 'x') * 1000 : null)],
      },
    }, p.series.length === 0 ? [[]] : uPlot.join(p.series.map((s) => steps(s.spans, !!p.bars))), el)
    plot.current = u
    return () => { u.destroy(); plot.current = null }
  }, [width, theme, p.series, gaps, most])
  const span = p.to - p.from
  const keys = (e: KeyboardEvent) => {
    const step = span / 48, here = at ?? p.to
    const to = { ArrowLeft: here - step, ArrowDown: here - step, ArrowRight: here + step, ArrowUp: here + step, PageDown: here - 8 * step, PageUp: here + 8 * step, Home: p.from, End: p.to }[e.key]
    if (to === undefined) return
    e.preventDefault()
    const t = Math.min(p.to - 1, Math.max(p.from, to))
    setAt(t)
    plot.current?.setCursor({ left: plot.current.valToPos(t / 1000, 'x'), top: 1 }, false)
  }
  const leave = () => { setAt(null); plot.current?.setCursor({ left: -10, top: -10 }, false) }
  const valueAt = (s: Series, t: number) => s.spans.find((q) => q.at <= t && t < q.until)?.value ?? null
  const stopped = (t: number) => off.some((o) => o.at <= t && t < o.until)
  const said = (t: number) => `${clock(t, Date.now())}: ${p.series.map((s) => { const v = valueAt(s, t); return `${p.series.length > 1 ? s.name + ' ' : ''}${v !== null ? p.format(v) : stopped(t) ? p.offText ?? 'stopped' : 'unknown'}` }).join(', ')}`
  const shownAt = at ?? p.to - 1
  return (
    <figure class="plot" data-chart={p.name}>
      <figcaption><strong>{p.name}</strong><span class="muted small" aria-hidden="true">{at === null ? p.aside : said(at)}</span></figcaption>
      <div ref={box} class="plotbox" role="slider" tabIndex={0} aria-label={`${p.name} over time`} aria-orientation="horizontal" aria-valuemin={Math.round(p.from / 60_000)} aria-valuemax={Math.round(p.to / 60_000)} aria-valuenow={Math.round(shownAt / 60_000)} aria-valuetext={said(shownAt)} data-gaps={gaps.length} onKeyDown={keys} onPointerLeave={leave} onBlur={leave} />
      <Table {...p} off={off} />
    </figure>
  )
}

/** A color as the browser computes it, which a canvas understands. */
function probe(el: HTMLElement, name: string): string {
  const was = el.style.color
  el.style.color = `var(${name})`
  const out = getComputedStyle(el).color
  el.style.color = was
  return out
}

const fade = (color: string) => color.replace(/^rgb\((.*)\)$/, 'rgba($1, 0.16)')

function hatched(c: CanvasRenderingContext2D, back: string, ink: string): CanvasPattern | string {
  const size = 7 * devicePixelRatio
  const tile = new OffscreenCanvas(size, size), d = tile.getContext('2d')!
  d.fillStyle = back
  d.fillRect(0, 0, size, size)
  d.strokeStyle = ink
  d.lineWidth = 1.5 * devicePixelRatio
  d.beginPath()
  for (const k of [-1, 0, 1]) { d.moveTo(k * size, size); d.lineTo((k + 1) * size, 0) }
  d.stroke()
  return c.createPattern(tile, 'repeat') ?? back
}

/** Labels the time axis in the browser's zone. */
function label(seconds: number): string {
  const d = new Date(seconds * 1000)
  if (d.getHours() === 0 && d.getMinutes() === 0) return d.toLocaleDateString('en', { day: 'numeric', month: 'short' })
  return d.toLocaleTimeString('en', { hour: '2-digit', minute: '2-digit', hourCycle: 'h23' })
}

/** The chart as a table: averages and peaks of 24 equal parts of the range, or each bar. */
function Table(p: Props & { off: { at: number; until: number }[] }) {
  const [open, setOpen] = useState(false)
  const now = Date.now()
  const size = (p.to - p.from) / 24
  const parts = p.bars ? p.series[0]?.spans ?? [] : Array.from({ length: 24 }, (_, i) => ({ at: p.from + i * size, until: p.from + (i + 1) * size }))
  const over = (list: { at: number; until: number }[], a: number, b: number) => list.reduce((n, s) => n + Math.max(0, Math.min(s.until, b) - Math.max(s.at, a)), 0)
  const cell = (s: Series, a: number, b: number) => {
    const list = s.spans.filter((q) => q.value !== null && q.until > a && q.at < b), time = over(list, a, b)
    if (time <= 0) return over(p.off, a, b) > (b - a) / 2 ? p.offText ?? 'stopped' : 'unknown'
    const mean = list.reduce((n, q) => n + q.value! * over([q], a, b), 0) / time
    return p.bars ? p.format(mean) : `${p.format(mean)}, peak ${p.format(Math.max(...list.map((q) => q.value!)))}`
  }
  return (
    <details onToggle={(e) => setOpen((e.currentTarget as HTMLDetailsElement).open)}>
      <summary>Show as table</summary>
      {open && (
        <div class="scroll" tabIndex={0} role="region" aria-label={`${p.name} as a table`}>
          <table>
            <thead><tr><th scope="col">From</th>{p.series.map((s) => <th key={s.name} scope="col">{s.name}</th>)}</tr></thead>
            <tbody>{[...parts].reverse().map((b) => <tr key={b.at}><th scope="row" class="nowrap">{clock(b.at, now)}</th>{p.series.map((s) => <td key={s.name}>{cell(s, b.at, b.until)}</td>)}</tr>)}</tbody>
          </table>
        </div>
      )}
    </details>
  )
}
