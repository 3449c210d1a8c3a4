// What is recorded of a worker, as the API gives it (internal/core/evidence,
// internal/protocol/control).

import { Missing, Problem, problemOf, session } from './api'

export interface Point { at: string; until: string; state: 'active' | 'quiet' | 'unknown' | 'absent'; value: number | null }

export interface Timeline {
  worker_id: string
  from: string
  to: string
  signals: { signal: string; unit?: string; threshold: number; points: Point[] }[]
  verdicts: { from: string; to: string; is_idle: boolean; eligible_for_pause: boolean; blocks: string[]; reason: string }[]
  power: { from: string; to: string; status: string }[]
  changes: { at: string; from?: string; to: string; by?: string; reason?: string }[]
  missing: Missing[]
  usd_per_hour: number | null
}

export interface Sum {
  key: string
  name?: string
  workers: number
  running_hours: number
  avoided_hours: number
  other_stopped_hours: number
  compute_saved_usd: number | null
  unpriced_hours: number
  storage_paid_usd: number | null
  unknown_storage_hours: number
  saved_usd: number | null
}

/** Formats what a sum saved, as a lower bound if some amounts are unknown. */
export function saved(s: Sum): string {
  return (s.saved_usd !== null && (s.unpriced_hours > 0 || s.unknown_storage_hours > 0) ? 'At least ' : '') + usd(s.saved_usd)
}

/** Explains which amounts of a sum are unknown; empty if none are. */
export function unknownMoney(s: Sum): string {
  const parts = []
  if (s.unpriced_hours > 0) parts.push(`the instance type has no known price for ${hours(s.unpriced_hours)} of the avoided time`)
  if (s.unknown_storage_hours > 0) parts.push(`the storage size or price is unknown for ${hours(s.unknown_storage_hours)}`)
  return parts.join('; ').replace(/^./, (c) => c.toUpperCase())
}

export interface Outcome extends Sum {
  name: string
  timeout_minutes: number
  schedule?: string
  pauses: number
  false_stops: number
  unknown_hours: number
  stops: { object: string; from: string; to: string; back: boolean; false_stop: boolean }[]
}

export interface Simulation { from: string; to: string; window_minutes: number; policies: Outcome[]; recommended: string; missing: Missing[]; workers: Record<string, string> }

/** What a group did in each hour of the week, from Sunday. */
export interface IdlePattern {
  key: string
  name?: string
  idle_by_hour_of_week: number[]
  in_use_by_hour_of_week: number[]
  stopped_by_hour_of_week: number[]
  unknown_by_hour_of_week: number[]
  idle_usd: number | null
  unpriced_idle_hours: number
}

export interface Savings {
  from: string
  to: string
  by: string
  groups: Sum[] | null
  total: Sum
  days: number
  idle_hours_not_avoided: Record<string, number>
  periods?: { from: string; to: string; groups: Sum[] | null; total: Sum }[]
  idle_by_hour_of_week: number[]
  idle?: IdlePattern[]
  idle_groups?: number
  missing: Missing[]
  missing_prices: { kind: 'instance' | 'storage'; aws_region: string; name: string; workers: number; avoided_hours: number }[]
}

/** Runs a simulation and reports progress from 0 to 1. Aborting also ends it on the server. */
export async function simulate(body: unknown, tell: (share: number) => void, signal: AbortSignal): Promise<Simulation> {
  const res = await fetch('/api/v1/simulate/progress', { method: 'POST', signal, body: JSON.stringify(body), headers: { Authorization: session.header, 'Content-Type': 'application/json' } })
  if (!res.ok || !res.body) throw await problemOf(res)
  const reader = res.body.pipeThrough(new TextDecoderStream() as unknown as ReadableWritablePair<string, Uint8Array>).getReader()
  let rest = ''
  for (;;) {
    const { value, done } = await reader.read()
    const parts = (rest + (value ?? '')).split('\n')
    rest = parts.pop() ?? ''
    for (const part of parts) {
      const step = JSON.parse(part) as { share: number; simulation?: Simulation; fault?: string }
      if (step.fault) throw new Problem(0, '', step.fault)
      if (step.simulation) return step.simulation
      tell(step.share)
    }
    if (done) throw new Problem(0, 'unreachable', 'The server closed the connection.')
  }
}

const money = new Intl.NumberFormat('en', { style: 'currency', currency: 'USD' })

/** "$12.40"; what has no price is unknown, never nothing. */
export function usd(v: number | null | undefined): string {
  return v === null || v === undefined ? 'unknown' : money.format(v)
}

const short = new Intl.NumberFormat('en', { style: 'currency', currency: 'USD', notation: 'compact', maximumFractionDigits: 2 })

/** "$12.5K", for the axis of a chart. */
export const usdShort = (v: number) => short.format(v)

/** "3.2 h", "1,204 h". */
export function hours(h: number): string {
  return `${h.toLocaleString('en', { maximumFractionDigits: h < 100 ? 1 : 0 })} h`
}

/** A number of a signal: "0.42", "12", "1,204". */
export function figure(v: number, unit?: string): string {
  const n = v.toLocaleString('en', { maximumFractionDigits: Math.abs(v) < 10 ? 2 : Math.abs(v) < 100 ? 1 : 0 })
  return unit ? `${n} ${unit}` : n
}

/** Downloads a file. */
export function saveFile(name: string, what: Blob) {
  const url = URL.createObjectURL(what)
  const a = document.createElement('a')
  a.href = url
  a.download = name
  a.click()
  setTimeout(() => URL.revokeObjectURL(url), 10_000)
}
