// Formatting and parsing of times and durations.

import { useEffect, useState } from 'preact/hooks'

const ticks = new Set<(now: number) => void>()
let timer = 0

/** Now, and again every second while a component shows it. */
export function useNow(): number {
  const [now, set] = useState(Date.now())
  useEffect(() => {
    ticks.add(set)
    if (!timer) timer = window.setInterval(() => { const t = Date.now(); for (const f of ticks) f(t) }, 1000)
    return () => {
      ticks.delete(set)
      if (ticks.size === 0) { clearInterval(timer); timer = 0 }
    }
  }, [])
  return now
}

const relative = new Intl.RelativeTimeFormat('en', { numeric: 'always' })

const steps: [number, Intl.RelativeTimeFormatUnit][] = [[60, 'second'], [60, 'minute'], [24, 'hour'], [30, 'day'], [12, 'month'], [Infinity, 'year']]

/** "2 hours ago", "in 5 minutes". Less than five seconds is "just now". */
export function ago(at: string | number, now: number): string {
  let n = (new Date(at).getTime() - now) / 1000
  if (Math.abs(n) < 5) return 'just now'
  for (const [size, unit] of steps) {
    if (Math.abs(n) < size) return relative.format(Math.trunc(n), unit)
    n /= size
  }
  return ''
}

/** "1 h 05 min", "4 min 09 s": a span of seconds, two units of it. */
export function span(seconds: number): string {
  const s = Math.max(0, Math.round(seconds))
  const two = (n: number) => String(n).padStart(2, '0')
  if (s < 60) return `${s} s`
  if (s < 3600) return `${Math.floor(s / 60)} min ${two(s % 60)} s`
  if (s < 86400) return `${Math.floor(s / 3600)} h ${two(Math.floor((s % 3600) / 60))} min`
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`
}

/** Minutes as a short span: "45 min", "2 h", "2 h 10 min". */
export function minutes(m: number): string {
  if (m < 1) return `${Math.round(m * 60)} s`
  if (m < 60) return `${Math.floor(m)} min`
  return span(m * 60).replace(/ (00 min|0 h)$/, '')
}

/** A sentence of the server with its times as the reader's own, and its lengths ("2h30m") as this page formats them. */
export function local(sentence: string, now: number): string {
  return sentence.replaceAll('worker-controller', 'lull').replace(/\(([a-z]+(?:_[a-z]+)+)\)/g, (_, code: string) => `(${code.replaceAll('_', ' ')})`).replace(/\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z/g, (t) => clock(t, now))
    .replace(/(?<![\w.:-])(\d+d)?(\d+h)?(\d+m)?(\d+(?:\.\d+)?m?s)?(?![\w:])/g, (all, ...parts) => (all === '' ? '' : parts.slice(0, 4).filter(Boolean).map((part: string) => part.replace(/^([\d.]+)m$/, '$1min').replace(/^([\d.]+)/, '$1 ')).join(' ')))
}

const day = new Intl.DateTimeFormat('en', { weekday: 'short', day: 'numeric', month: 'short' })
const clockFormat = new Intl.DateTimeFormat('en', { hour: '2-digit', minute: '2-digit', second: '2-digit', hourCycle: 'h23' })

/** "Sat, Nov 21 14:05:09", in the reader's own zone. */
export function exact(at: string | number): string {
  const d = new Date(at)
  return `${day.format(d)} ${clockFormat.format(d)}`
}

/** "14:05", or with the day when it is another one. */
export function clock(at: string | number, now: number): string {
  const d = new Date(at)
  const t = clockFormat.format(d).slice(0, 5)
  return d.toDateString() === new Date(now).toDateString() ? t : `${day.format(d)} ${t}`
}

const unitMinutes: Record<string, number> = { s: 1 / 60, m: 1, h: 60, d: 1440, w: 10080 }

/**
 * Reads a duration in minutes in the usual notations: "90", "1h 30m", "1.5 hours",
 * "2 days", "1:30". A bare number is minutes. Null if it is not a duration.
 */
export function parseMinutes(text: string): number | null {
  const t = text.trim().toLowerCase().replace(',', '.')
  if (t === '') return null
  if (/^\d+(\.\d+)?$/.test(t)) return Number(t)
  const clock = /^(\d+):([0-5]\d)$/.exec(t)
  if (clock) return Number(clock[1]) * 60 + Number(clock[2])
  const part = /(\d+(?:\.\d+)?)\s*(seconds?|secs?|s|minutes?|mins?|m|hours?|hrs?|h|days?|d|weeks?|w)\s*(?:and\s+)?/y
  let at = 0, sum = 0
  while (at < t.length) {
    part.lastIndex = at
    const m = part.exec(t)
    if (!m) return null
    sum += Number(m[1]) * unitMinutes[m[2]![0]!]!
    at = part.lastIndex
  }
  return sum
}
