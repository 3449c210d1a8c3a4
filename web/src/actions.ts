// What actions of the audit log are called.

import { words } from './parts/ui'

const names: Record<string, string> = {
  activity_updated: 'Used', adopted: 'Adopted', created: 'Created', imported: 'Imported', updated: 'Changed', forgotten: 'Forgotten', moved: 'Moved',
  drain_cancelled: 'Drain cancelled', drain_ended: 'Drain ended', drain_started: 'Drain began', drained: 'Drained',
  external_pause: 'Stopped outside lull', external_start: 'Started outside lull', external_terminate: 'Terminated outside lull',
  halted: 'Halted', halt_ended: 'Halt ended', hibernate_fallback: 'Stopped, as it cannot hibernate', idle_detection_toggled: 'Idle detection switched',
  instance_missing: 'Instance not found', late_action: 'Acted late', late_activity: 'Use was reported late', launch_again: 'Launched again',
  pause_action_chosen: 'Chose how to pause', pause_cancelled: 'Pause cancelled', pause_intended: 'Pause decided', pause_warning: 'Warned of a pause',
  policy_applied: 'Policy applied', policy_deleted: 'Policy removed', policy_put: 'Policy changed', policy_tags: 'Policy written to tags', policy_unapplied: 'Policy taken away',
  provision_failed: 'Launch failed', provisioned: 'Launched', resume_intended: 'Resume asked for', resumed: 'Resumed', retry: 'Tried again',
  override_added: 'Exception made', override_ended: 'Exception ended', armed: 'Armed', disarmed: 'Put into shadow',
  schedule_deleted: 'Schedule removed', schedule_put: 'Schedule changed', budget_deleted: 'Budget removed', budget_put: 'Budget changed', settings_changed: 'Settings changed',
  signal_unknown: 'A signal is unknown', snooze_ended: 'Snooze ended', snoozed: 'Snoozed', start_held: 'Start held back', start_withdrawn: 'Start taken back',
  status_changed: 'Status changed', stopped: 'Stopped', template_deleted: 'Template removed', template_put: 'Template changed',
  terminate_intended: 'End asked for', terminated: 'Terminated', token_created: 'Token made', token_revoked: 'Token revoked', ttl_adopted: 'End of life taken from its tag', ttl_dropped: 'End of life taken away',
  wake_token_made: 'Wake link made', would_pause: 'Would be paused (shadow)', would_resume: 'Would be resumed (shadow)',
}

/** An action as people say it. */
export function action(code: string): string {
  return names[code] ?? words(code).replace(/^./, (c) => c.toUpperCase())
}

export const actions = Object.entries(names).sort((a, b) => a[1].localeCompare(b[1]))

/** A status as people say it: "RUNNING" is "running". */
export function status(code: string | undefined): string {
  return words(code).toLowerCase()
}

/** Who did it, by the kind of an entry. */
export const kinds: Record<string, string> = { person: 'a user', controller: 'lull itself', schedule: 'a schedule', agent: 'an agent', wake: 'a wake link', cloud: 'the cloud' }

/** Who did something, as people say it. */
export function doer(name: string | undefined): string {
  return name === 'worker-controller' ? 'lull' : name || 'a user'
}
