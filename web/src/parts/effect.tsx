// Live preview of a policy change, replayed over the last week.

import { useEffect, useState } from 'preact/hooks'
import { Outcome, hours, saved, simulate } from '../evidence'
import { Policy } from '../rules'
import { minutes } from '../time'

/** The values of a policy that a replay can try. */
export interface Trial { timeout_minutes: number; snooze_minutes: number | null; warn_before_minutes: number | null; schedule: string }

/** Milliseconds without typing before a replay begins. */
const pause = 600

export function Effect(p: { was: Policy | null; tried: Trial | null }) {
  const { tried, was } = p
  const [result, setResult] = useState<Outcome[] | null>(null)
  const [state, setState] = useState<'' | 'busy' | 'failed'>('')
  const key = JSON.stringify(tried)
  useEffect(() => {
    if (!tried) { setResult(null); setState(''); return }
    const control = new AbortController()
    const timer = setTimeout(async () => {
      setState('busy')
      const numbers = { ...(tried.snooze_minutes !== null ? { snooze_minutes: Math.round(tried.snooze_minutes) } : {}), ...(tried.warn_before_minutes !== null ? { warn_before_minutes: Math.round(tried.warn_before_minutes) } : {}), ...(tried.schedule ? { schedule: tried.schedule } : {}) }
      const policies: unknown[] = [{ name: 'as edited', timeout_minutes: tried.timeout_minutes, ...numbers }]
      if (was?.idle_timeout_minutes) policies.push({ name: was.name })
      try {
        const s = await simulate({ policies, from: new Date(Date.now() - 7 * 86_400_000).toISOString() }, () => {}, control.signal)
        setResult(s.policies)
        setState('')
      } catch {
        if (!control.signal.aborted) setState('failed') // the form still works
      }
    }, pause)
    return () => { clearTimeout(timer); control.abort() }
  }, [key])
  const [now, before] = [result?.find((o) => o.name === 'as edited'), result?.find((o) => o.name !== 'as edited')]
  const known = now && now.running_hours + now.avoided_hours > 0
  const row = (o: Outcome, title: string) => <tr><th scope="row">{title} <span class="muted small">{minutes(o.timeout_minutes)}</span></th><td>{o.pauses.toLocaleString('en')}</td><td class={o.false_stops > 0 ? 'bad' : ''}>{o.false_stops.toLocaleString('en')}</td><td>{hours(o.avoided_hours)}</td><td>{saved(o)}</td></tr>
  return (
    <div class="effect" role="status" aria-busy={state === 'busy'}>
      <h3>Effect on all workers over the last 7 days</h3>
      {!tried ? <p class="muted small">Enter an idle timeout to preview it.</p>
        : state === 'failed' ? <p class="muted small">Preview unavailable.</p>
        : !now ? <p class="muted small">Replaying recorded days…</p>
        : !known ? <p class="muted small">Not enough data yet.</p> : (
          <table class="numbers">
            <thead><tr><td /><th scope="col">Pauses</th><th scope="col">False stops</th><th scope="col">Avoided</th><th scope="col">Saved</th></tr></thead>
            <tbody>{row(now, 'As edited')}{before && row(before, 'Current')}</tbody>
          </table>
        )}
    </div>
  )
}
