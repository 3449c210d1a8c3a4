// Requests to the server. Field names are those of the API (docs/reference/server-openapi.json).


export type Standing =
  | 'active' | 'idle' | 'pausing_soon' | 'blocked' | 'unknown' | 'checking' | 'paused' | 'starting' | 'failed' | 'ended'

export interface WorkerRow {
  id: string
  name: string
  aws_region: string
  instance_type?: string
  template_name?: string
  owner?: string
  status: string
  desired_status: string
  standing: Standing
  sentence: string
  block?: string
  attention?: boolean
  idle_minutes: number
  timeout_minutes: number
  last_activity_at: string | null
  target_pause_at: string | null
  snooze_until: string | null
  last_paused_at: string | null
  pause_reason?: string
  armed: boolean
  usd_per_hour: number | null
  cpu_utilization: number | null
  ec2_instance_id?: string
  https_endpoint?: string
  revision: number
}

export interface ScannedRegion {
  aws_region: string
  account?: string
  ami_name_patterns: string[]
  image_owners: string[]
  error?: string
  instances: number
  found: number
  skipped: Record<string, number>
}

export interface Scan { at: string; next_at: string; discovery_import: string; tag: string; regions: ScannedRegion[] }

export interface Discovered { aws_region: string; account?: string; ec2_instance_id: string; name?: string; state: string; orphan?: boolean }

export interface Halt { on: boolean; by?: string; at?: string; reason?: string; until?: string }

export interface Overview {
  at: string
  revision: number
  total: number
  matched: number
  counts: Partial<Record<Standing, number>>
  attention: WorkerRow[]
  attention_total: number
  unarmed_total: number
  aws_regions: string[]
  offset: number
  items: WorkerRow[]
  halt: Halt
}

export interface ActivityEvent { category: string; timestamp: string; data?: unknown }

export interface Worker {
  id: string
  name: string
  aws_region: string
  instance_type?: string
  template_name?: string
  ami_id?: string
  tags?: Record<string, string>
  owner?: string
  contacts?: string[]
  status: string
  desired_status: string
  status_reason?: string
  status_since: string
  ec2_instance_id?: string
  public_ip?: string
  private_ip?: string
  https_endpoint?: string
  cml_version?: string
  policy?: string
  schedule?: string
  ttl_deadline?: string
  ttl_action?: string
  pause_action?: string
  pause_holder?: string
  armed: boolean
  draining?: boolean
  is_idle_detection_enabled: boolean
  account?: string
  idle_timeout_minutes?: number
  snooze_minutes?: number
  activity_sources?: string[] | null
  accepted_risks?: string[] | null
  cml_username?: string
  tls_pin?: string
  tls_ca?: string
  tls_insecure?: boolean
  license: { status: string; pending_operation?: string; operation_in_progress?: string; last_error?: string }
  created_at: string
  running_since: string | null
  last_activity_at: string | null
  last_activity_check_at: string | null
  recent_activity_events: ActivityEvent[] | null
  auto_pause_count: number
  manual_pause_count: number
  auto_resume_count: number
  manual_resume_count: number
  external_pause_count: number
  external_resume_count: number
  last_paused_at: string | null
  last_resumed_at: string | null
  last_paused_by?: string
  last_resumed_by?: string
  pause_reason?: string
  snoozed_until: string | null
  snoozed_by?: string
  intent?: { reason: string; by: string; at: string; drain?: boolean }
}

/** A template from which workers are launched. */
export interface Template {
  name: string
  description?: string
  instance_type: string
  ami_name_filter: string
  user_data?: string
  iam_instance_profile?: string
  enabled?: boolean
  agent?: boolean
  hibernation?: string
  capacity?: { cpu_cores?: number; memory_gb?: number; storage_gb?: number; max_nodes?: number }
  root_volume?: { gb?: number; encrypted?: boolean; type?: string }
  idle_detection?: { enabled?: boolean; idle_threshold_minutes?: number; hibernate_threshold_minutes?: number; check_interval_minutes?: number }
  activity_sources?: string[] | null
  accepted_risks?: string[] | null
  cml_username?: string
  cml_password?: string
  tls_pin?: string
  tls_ca?: string
  tls_insecure?: boolean
}

export interface Block { code: string; sentence: string; signal?: string; holder?: string; until?: string }

export interface Reading {
  signal: string
  state: 'active' | 'quiet' | 'unknown' | 'absent'
  value: number
  threshold: number
  unit?: string
  window_seconds?: number
  at?: string
  last_event?: string
  max_age_seconds?: number
  detail?: string
}

export interface IdleStatus {
  is_idle: boolean
  idle_minutes: number
  idle_duration: number
  timeout_minutes: number
  auto_pause_enabled: boolean
  checked_at: string
  last_activity_at: string | null
  in_snooze_period: boolean
  snooze_until: string | null
  eligible_for_pause: boolean
  target_pause_at: string | null
  warn_at: string | null
  next_idle_check_at?: string
  reason: string
  blocks: Block[] | null
  action?: string
  readings: Reading[] | null
  readings_unknown?: boolean
}

export interface Entry {
  id: number
  at: string
  action: string
  events?: string[]
  by: { name: string; kind: string }
  worker_id?: string
  worker_name?: string
  aws_region?: string
  from?: string
  to?: string
  reason?: string
  detail?: string
}

export interface Missing { from: string; to: string; server?: string; why: string }

export interface Turn { at: string; by: string; reason?: string }

export interface SignalReading {
  signal: string
  verdict: 'active' | 'quiet' | 'unknown' | 'absent'
  value: number | null
  threshold: number
  unit?: string
  window_seconds: number
  age_seconds: number | null
  last_event: string | null
  counts: boolean
  detail?: string
}

/** Why, in the one form that workers, instances and agents share. */
export interface Account {
  name: string
  at: string
  state: string
  question: string
  answer: string
  verdict?: { blocks: Block[] | null; eligible_for_pause: boolean; is_idle: boolean; target_pause_at: string | null }
  signals: SignalReading[] | null
  leases: { holder: string; reason: string; expires_at: string }[] | null
  paused?: Turn
  resumed?: Turn
  change: string[] | null
  checked?: { at: string; since: string; until?: string; engine_differs: boolean; was?: string[] }
  missing?: Missing[]
}

export interface Why extends Account {
  worker_id: string
  standing?: Standing
  status: string
  idle_status: IdleStatus
  last: Entry[] | null
  readings: 'live' | 'recorded' | 'unknown'
  halted: boolean
}

export interface Metrics {
  cpu_utilization: number | null
  memory_utilization: number | null
  disk_utilization: number | null
  labs_count: number | null
  nodes_count: number | null
  cml_version?: string
  collected_at: string | null
  cml_error?: string
  readings: 'live' | 'unknown'
  samples?: Record<string, { value: number | null; at: string | null; error?: string }>
}

export interface List<T> { items: T[]; next?: string }

export interface Session { name: string; role: string; fleet: string; version: string; halted: boolean; shadow: boolean; /** The only host that is shown, without a fleet. */ host?: string }

export interface Setting { key: string; value: unknown; source: string; doc?: string; unit?: string; default?: unknown; [more: string]: unknown }

export interface Token {
  id: string
  name: string
  role: string
  machine?: string
  created_at: string
  created_by: string
  expires_at?: string
  revoked_at?: string
  revoked_by?: string
  token?: string
}

export interface Machine { name: string; kind: string; reported_at: string | null; age_seconds: number; report?: Record<string, unknown> }

export interface Lease { holder: string; reason?: string; expires_at: string }

/** An instance of a host, as last reported by the host. */
export interface HostInstance {
  id: string
  name: string
  state: string
  last_state?: string
  state_since: string | null
  status_reason: string
  enabled: boolean
  runtime: string
  image?: string
  created_at: string
  last_activity_at: string | null
  last_paused_at: string | null
  last_paused_by: string
  last_resumed_at: string | null
  last_resumed_by: string
  idle_for: number
  snooze_until: string | null
  pause_at: string | null
  next_step: string
  next_step_at: string | null
  pause_after: number
  stop_after: number
  connections: number
  leases: Lease[]
  endpoints: { proto?: string; listen: string; target: string; path: string; status?: string }[]
  blocks: Block[]
  memory_bytes: number
  memory_limit: number
  reclaimed_bytes: number
  pause_count: number
  wake_count: number
  restart_count: number
  exit_code: number | null
  crash_looping: boolean
  waiting: { reason: string; place: number; until: string } | null
}

export interface HostSummary {
  name: string
  heard: boolean
  heard_at: string | null
  unheard_since: string | null
  unheard?: string
  server: string
  version: string
  outdated: boolean
  started_at: string | null
  halted: boolean
  instances_total: number
  left_out: number
  accepts_commands: boolean
  counts: Record<string, number>
  memory: { limit_bytes: number; free_bytes: number; waiting: number }
  held_bytes: number
  faults: string[]
}

export interface HostView extends HostSummary { instances: HostInstance[]; next?: string }

export interface HostWhy extends Account { host: string; readings: 'live' | 'recorded' | 'unknown'; unheard?: string; instance: HostInstance | null; events: HostEvent[] }

/** Something that happened to an instance. */
export interface HostEvent { time: string; type: string; state: string; by: string; reason: string }

export interface AgentWhy extends Account { machine: string; worker_id?: string; readings: 'live' | 'recorded' | 'unknown'; unheard?: string; last: Entry[] }

/** An error response (RFC 9457); status 0 if the server did not respond. */
export class Problem extends Error {
  constructor(readonly status: number, readonly code: string, detail: string, readonly fields: { message: string; location?: string }[] = []) {
    super(detail)
  }
}

const sessionKey = 'lull-session'
let changed: () => void = () => {}

/** Half of the session; a cookie that scripts cannot read is the other half (docs/decisions/0012-dashboard.md). */
export const session = {
  get secret(): string { return localStorage.getItem(sessionKey) ?? '' },
  get header(): string { return `Session ${this.secret}` },
  set(secret: string) {
    localStorage.setItem(sessionKey, secret)
    changed()
  },
  /** Signs out, in all tabs. */
  end() {
    void fetch('/sign-in', { method: 'DELETE', headers: { Authorization: this.header }, keepalive: true }).catch(() => {}) // it expires
    this.forget(this.secret)
  },
  /** Ends a session that the server refuses, unless another has begun since. */
  forget(secret: string) {
    if (secret !== this.secret) return
    localStorage.removeItem(sessionKey)
    changed()
  },
  onChange(f: () => void) { changed = f },
}

// Another tab signed in or out.
window.addEventListener('storage', (e) => {
  if (e.key !== sessionKey && e.key !== null) return
  if (e.oldValue && e.newValue) location.reload() // perhaps as another user
  else changed()
})

function key(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, '0')).join('')
}

export interface Answer<T> { value: T; revision: number; status: number }

/** Asks for a path below /api/v1. Throws a Problem. */
export async function ask<T>(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<Answer<T>> {
  const secret = session.secret
  const headers: Record<string, string> = { Authorization: session.header, Accept: 'application/json' }
  if (body !== undefined) headers['Content-Type'] = 'application/json'
  if (method !== 'GET') headers['Idempotency-Key'] = key()
  // A broken connection is tried again: the key makes that harmless.
  let res: Response | undefined
  for (let tries = 1; !res; tries++) {
    try {
      res = await fetch('/api/v1' + path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal })
    } catch (e) {
      if (signal?.aborted) throw e
      if (tries === 3) throw new Problem(0, 'unreachable', 'The server is not responding.')
      await new Promise((go) => setTimeout(go, 200 * tries))
    }
  }
  if (!res.ok) throw await problemOf(res, secret)
  const value = (res.status === 204 || res.headers.get('Content-Length') === '0' ? undefined : await res.json()) as T
  return { value, status: res.status, revision: Number((res.headers.get('ETag') ?? '').replaceAll('"', '')) || 0 }
}

/** Reads the problem of a failed response. A rejected token ends the session. */
export async function problemOf(res: Response, secret = session.secret): Promise<Problem> {
  let p: Problem
  try {
    const d = (await res.json()) as { type?: string; detail?: string; title?: string; errors?: { message: string; location?: string }[] }
    p = new Problem(res.status, (d.type ?? '').replace('urn:lull:problem:', ''), d.detail || d.title || res.statusText, d.errors ?? [])
  } catch {
    p = new Problem(res.status, '', `The server responded with ${res.status} ${res.statusText}`)
  }
  if (p.status === 401 && secret) session.forget(secret)
  return p
}
