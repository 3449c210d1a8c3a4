// Actions on workers of a list: from a row's menu, or on a selection.

import { ask, WorkerRow } from '../api'
import { MenuItems } from './menu'
import { attempt } from './ui'
import { awsConsole, DialogKind, workerAt } from './workerdialogs'

/** An action that needs no form. takes reports whether it applies to a worker. */
export interface Verb { key: string; label: string; asks: string; done: string; path: string; body?: unknown; admin?: boolean; takes: (r: WorkerRow) => boolean }

const running = (r: WorkerRow) => r.status === 'RUNNING'

export const verbs: Verb[] = [
  { key: 'pause', label: 'Pause', asks: 'The instances are stopped even if someone is using them. They can be resumed at any time.', done: 'pausing', path: 'pause', takes: running },
  { key: 'resume', label: 'Resume', asks: 'The instances are started.', done: 'resuming', path: 'resume', takes: (r) => r.status === 'STOPPED' || r.status === 'STOPPING' },
  { key: 'snooze', label: 'Snooze for 1 hour', asks: 'They are not paused automatically for an hour.', done: 'snoozed for an hour', path: 'snooze', body: { minutes: 60 }, takes: running },
  { key: 'snooze4', label: 'Snooze for 4 hours', asks: 'They are not paused automatically for four hours.', done: 'snoozed for four hours', path: 'snooze', body: { minutes: 240 }, takes: running },
  { key: 'drain', label: 'Drain', asks: 'They take no new work, and stop when idle or when the drain timeout expires.', done: 'draining', path: 'drain', takes: running },
  { key: 'check', label: 'Check now', asks: 'Checks their activity now. Eligible workers are paused.', done: 'checked', path: 'detect-idle', takes: running },
  { key: 'arm', label: 'Arm', asks: 'lull may pause them from now on.', done: 'armed', path: 'arm', admin: true, takes: (r) => !r.armed },
  { key: 'disarm', label: 'Disarm (dry run)', asks: 'lull only records what it would do.', done: 'in dry-run mode', path: 'disarm', takes: (r) => r.armed },
]

export const act = (r: WorkerRow, v: Verb) => ask('POST', `${workerAt(r.id)}/${v.path}`, v.body)

/** The menu of one worker. open shows a dialog for it. */
export function rowMenu(r: WorkerRow, o: { operator: boolean; admin: boolean; open: (kind: DialogKind) => void; reload: () => void }): MenuItems {
  const items: MenuItems = [{ label: 'Open', href: workerAt(r.id) }]
  if (o.operator) {
    items.push(null)
    for (const v of verbs) {
      if (!v.takes(r) || v.admin && !o.admin || v.key === 'snooze4') continue
      if (v.key === 'pause' || v.key === 'drain') items.push({ label: `${v.label}…`, run: () => o.open(v.key as DialogKind) })
      else if (v.key === 'snooze') items.push({ label: 'Snooze…', run: () => o.open('snooze') })
      else items.push({ label: v.label, run: () => void attempt(`${r.name} is ${v.done}.`, () => act(r, v)).then(o.reload) })
    }
    items.push(null, { label: 'Edit…', run: () => o.open('edit') }, { label: 'Expiry…', run: () => o.open('expiry') }, { label: 'CML license…', run: () => o.open('license') })
  }
  if (r.https_endpoint || r.ec2_instance_id) items.push(null)
  if (r.https_endpoint) items.push({ label: 'CML console', href: r.https_endpoint, external: true })
  if (r.ec2_instance_id) items.push({ label: 'AWS console', href: awsConsole(r.aws_region, r.ec2_instance_id), external: true })
  if (o.admin) items.push(null, { label: 'Terminate…', danger: true, run: () => o.open('terminate') })
  return items
}
