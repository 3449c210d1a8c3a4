// What rules look like on the wire (internal/core/policy).

import { ask, List } from './api'
import { minutes } from './time'

export interface Scope { worker_ids?: string[]; tags?: Record<string, string>; aws_region?: string }

export interface PolicyValues {
  enabled?: boolean
  idle_timeout_minutes?: number
  warn_before_minutes?: number
  check_interval_minutes?: number
  snooze_minutes?: number
  pause_action?: string
  activity_sources?: string[]
  signals?: string[]
  thresholds?: Record<string, number>
  accepted_risks?: string[]
  shadow?: boolean
  schedule?: string
  force?: boolean
}

export interface Policy extends PolicyValues { name: string; description?: string; shipped?: boolean; updated_at?: string; updated_by?: string }

export interface Group { id: string; selector: Scope; policy?: string; schedule?: string; priority?: number; updated_by?: string }

export interface Override { id: string; kind: 'keep' | 'skip' | 'freeze' | 'policy'; selector: Scope; policy?: string; from: string; until: string; by: string; reason?: string; worker_names?: Record<string, string> }

export interface Budget { name: string; description?: string; for: string; max_actions?: number; max_percent?: number; per_minutes: number; reasons?: string[]; selector: Scope; state: { sentence: string; free: boolean; free_at?: string | null; count: number; limit: number } }

export interface ScheduleWindow { name?: string; days?: string; date?: string; from: string; to: string; hold?: boolean; on_holidays?: boolean }

export interface Schedule { name: string; description?: string; zone: string; windows: ScheduleWindow[]; holidays?: string[]; start?: boolean; grace_minutes?: number }

export interface Boundaries { schedule: string; zone: string; open: boolean; items: { at: string; opens: boolean }[] | null }

export interface Origin { layer: string; name?: string; policy?: string }

export interface WorkerPolicy {
  name: string
  enabled: boolean
  idle_timeout_seconds: number
  warn_before_seconds: number
  check_interval_seconds: number
  snooze_seconds: number
  pause_action: string
  activity_sources: string[] | null
  accepted_risks: string[] | null
  shadow: boolean
  schedule: string
  force: boolean
  from: Record<string, Origin>
  standing?: { schedule: string; zone: string; open: boolean; next?: { at: string; opens: boolean } }
  overrides: Override[] | null
  faults?: string[]
  budgets: { budget: string; sentence: string; free: boolean }[] | null
}

/** Formats a selector for display: "team=ml in us-east-1", "all workers". */
export function scope(s: Scope | undefined): string {
  const parts = Object.entries(s?.tags ?? {}).map(([k, v]) => (v ? `${k}=${v}` : k)).concat(s?.worker_ids ?? [])
  const text = parts.join(', ')
  if (s?.aws_region) return text ? `${text} in ${s.aws_region}` : `all in ${s.aws_region}`
  return text || 'all workers'
}

/** What an exception does. */
export function overrideKinds(o: Override): string {
  return { keep: 'Keep running', skip: 'Skip the schedule', freeze: 'Freeze', policy: `Use ${o.policy}` }[o.kind]
}

/** For whom an exception holds, by names. */
export function whom(o: Override): string {
  const text = scope({ ...o.selector, worker_ids: o.selector.worker_ids?.map((id) => o.worker_names?.[id] ?? id) })
  return text === 'all workers' ? 'the whole fleet' : text
}

/** The ids of workers that are named "cml-1, cml-2", or given by id. */
export async function workersOf(text: string): Promise<string[]> {
  const out: string[] = []
  for (const name of text.split(',').map((n) => n.trim()).filter(Boolean)) {
    const { value } = await ask<List<{ id: string }>>('GET', `/workers?limit=2&name=${encodeURIComponent(name)}`)
    if (value.items.length > 1) throw new Error(`More than one worker is named ${name}. Use the worker ID.`)
    out.push(value.items[0]?.id ?? (await ask<{ id: string }>('GET', `/workers/${encodeURIComponent(name)}`)).value.id)
  }
  return out
}

/** Reads workers, "team=ml, env" and a region as a selector. Empty means none, unless all is set. */
export function selector(workers: string[], tags: string, region: string, all: boolean): Scope & { all?: boolean } {
  const out: Scope & { all?: boolean } = {}
  if (workers.length > 0) out.worker_ids = workers
  for (const part of tags.split(',').map((p) => p.trim()).filter(Boolean)) {
    const at = part.indexOf('=')
    out.tags = { ...out.tags, [at < 0 ? part : part.slice(0, at).trim()]: at < 0 ? '' : part.slice(at + 1).trim() }
  }
  if (region.trim()) out.aws_region = region.trim()
  const some = out.worker_ids || out.tags || out.aws_region
  if (some && all) throw new Error('Select the whole fleet or specific workers, not both.')
  if (!some && !all) throw new Error('Select workers, tags, a region or the whole fleet.')
  if (all) out.all = true
  return out
}

/** Summarizes a policy in a sentence. */
export function says(v: PolicyValues): string {
  const parts: string[] = []
  if (v.enabled === false) parts.push('never pauses idle workers')
  if (v.idle_timeout_minutes !== undefined) parts.push(`${v.pause_action === 'hibernate' ? 'hibernates' : v.pause_action === 'auto' ? 'hibernates or stops' : 'pauses'} after ${minutes(v.idle_timeout_minutes)}`)
  else if (v.pause_action) parts.push(`pauses by ${v.pause_action}`)
  if (v.warn_before_minutes !== undefined) parts.push(v.warn_before_minutes === 0 ? 'without a warning' : `warns ${minutes(v.warn_before_minutes)} before`)
  if (v.snooze_minutes !== undefined) parts.push(`snoozes ${minutes(v.snooze_minutes)} after a resume`)
  if (v.check_interval_minutes !== undefined) parts.push(`checks every ${minutes(v.check_interval_minutes)}`)
  if (v.activity_sources) parts.push(`reads ${v.activity_sources.join(', ')}`)
  if (v.signals) parts.push(`counts ${v.signals.join(', ')}`)
  if (v.accepted_risks?.length) parts.push(`accepts ${v.accepted_risks.join(', ')}`)
  if (v.schedule) parts.push(`follows the schedule ${v.schedule}${v.force ? ', even if in use' : ''}`)
  if (v.shadow) parts.push('dry run')
  return parts.length === 0 ? 'no values set' : parts.join('; ')
}
