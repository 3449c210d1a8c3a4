// CPU, activity and cost of a worker, from what is recorded of it.

import { useMemo } from 'preact/hooks'
import { Timeline, usd, usdShort } from '../evidence'
import { Chart, Series, Span } from './chart'
import { Card } from './ui'

const ms = (at: string) => new Date(at).getTime()
const hour = 3_600_000

const rate = new Intl.NumberFormat('en', { style: 'currency', currency: 'USD', maximumFractionDigits: 3 })

/** Statuses in which an instance is not billed. */
const notBilled = new Set(['STOPPED', 'TERMINATED', 'PENDING', 'PROVISIONING'])

interface Range { at: number; until: number }

/** How much of a part the ranges cover, in milliseconds. */
const covered = (list: Range[], a: number, b: number) => list.reduce((n, s) => n + Math.max(0, Math.min(s.until, b) - Math.max(s.at, a)), 0)

/** Ranges without overlaps. */
function union(list: Range[]): Range[] {
  const out: Range[] = []
  for (const r of [...list].sort((x, y) => x.at - y.at)) {
    const last = out[out.length - 1]
    if (last && r.at <= last.until) last.until = Math.max(last.until, r.until)
    else out.push({ ...r })
  }
  return out
}

/** The parts of a range, which begin at full hours of the browser's zone. */
function parts(from: number, to: number, hours: number): Range[] {
  const d = new Date(from)
  d.setHours(Math.floor(d.getHours() / hours) * hours, 0, 0, 0)
  const out: Range[] = []
  while (d.getTime() < to) {
    const at = d.getTime()
    d.setHours(d.getHours() + hours)
    if (d.getTime() <= at) d.setTime(at + hours * hour) // the clock was set back
    out.push({ at: Math.max(at, from), until: Math.min(d.getTime(), to) })
  }
  return out
}

export function UseCharts(p: { t: Timeline }) {
  const { t } = p
  const of = useMemo(() => figures(t), [t])
  const range = { from: ms(t.from), to: ms(t.to), off: of.off }
  return (
    <Card title="CPU, activity and cost">
      {of.cpu.length > 0 ? <Chart {...range} name="CPU" series={of.cpu} threshold={of.threshold} format={(v) => `${v.toLocaleString('en', { maximumFractionDigits: v < 10 ? 1 : 0 })} %`} offText="stopped" aside={of.threshold > 0 ? `dashed: threshold, ${of.threshold} %` : undefined} />
        : <p class="muted small">No CPU readings are recorded for this time.</p>}
      <Chart {...range} name="In use" series={of.use} bars top={100} format={(v) => `${Math.round(v)} %`} offText="stopped" aside={`share of each ${of.hours === 1 ? 'hour' : `${of.hours} hours`}`} />
      {t.worker_id && (t.usd_per_hour === null ? <p class="muted small" data-unpriced>Cost: no price is known for its instance type.</p>
        : <Chart {...range} off={[]} name="Compute cost" series={of.cost} bars format={usd} axis={usdShort} aside={`${of.partial ? 'at least ' : ''}${usd(of.total)} at ${rate.format(t.usd_per_hour)} per hour`} />)}
    </Card>
  )
}

function figures(t: Timeline) {
  const from = ms(t.from), to = ms(t.to), hours = to - from > 48 * hour ? 6 : 1
  const off = t.power.filter((x) => notBilled.has(x.status)).map((x) => ({ at: ms(x.from), until: ms(x.to) }))
  const signals = t.signals.filter((s) => s.unit === '%' && ['cpu', 'cloudwatch'].includes(s.signal))
  const spans = (points: Timeline['signals'][number]['points']): Span[] => points.map((q) => ({ at: ms(q.at), until: ms(q.until), value: q.value }))
  const cpu: Series[] = signals.map((s) => ({ name: s.signal === 'cpu' ? 'Agent' : 'CloudWatch', spans: spans(s.points) }))
  const states = (want: (state: string) => boolean) => union(t.signals.flatMap((s) => s.points.filter((q) => want(q.state)).map((q) => ({ at: ms(q.at), until: ms(q.until) }))))
  const active = states((s) => s === 'active'), known = states((s) => s === 'active' || s === 'quiet')
  const all = parts(from, to, hours)
  // A part of which most is unknown has no share.
  const use = all.map((b): Span => {
    const k = covered(known, b.at, b.until), free = covered(off, b.at, b.until)
    return { ...b, value: k === 0 || k + free < (b.until - b.at) / 2 ? null : (covered(active, b.at, b.until) / (b.until - b.at)) * 100 }
  })
  const price = t.usd_per_hour ?? 0
  const billed = t.power.filter((x) => x.status && !notBilled.has(x.status)).map((x) => ({ at: ms(x.from), until: ms(x.to) }))
  const cost = all.map((b): Span => {
    const on = covered(billed, b.at, b.until), free = covered(off, b.at, b.until)
    return { ...b, value: on + free < (b.until - b.at) * 0.99 ? null : (on / hour) * price }
  })
  const total = (covered(billed, from, to) / hour) * price
  return { off, hours, cpu, threshold: Math.max(0, ...signals.map((s) => s.threshold)), use: [{ name: 'In use', spans: use }], cost: [{ name: 'Cost', spans: cost }], total, partial: cost.some((c) => c.value === null) }
}
