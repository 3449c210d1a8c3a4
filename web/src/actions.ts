// Display names of audit actions, statuses and actors.

import { words } from './parts/ui'

const names: Record<string, string> = {
  activity_updated: 'Activity seen', adopted: 'Adopted', created: 'Created', imported: 'Imported', updated: 'Edited', forgotten: 'Removed from lull', moved: 'Moved',
  drain_cancelled: 'Drain canceled', drain_ended: 'Drain ended', drain_started: 'Drain started', drained: 'Drained',
  external_pause: 'Stopped outside lull', external_start: 'Started outside lull', external_terminate: 'Terminated outside lull',
  host_command: 'Command for a host', host_command_outcome: 'Outcome of a command for a host',
  halted: 'Halted', halt_ended: 'Halt ended', hibernate_fallback: 'Stopped instead of hibernated', idle_detection_toggled: 'Idle detection toggled',
  instance_missing: 'Instance not found', late_action: 'Late action', late_activity: 'Late activity report', launch_again: 'Relaunched',
  pause_action_chosen: 'Pause action chosen', pause_cancelled: 'Pause canceled', pause_intended: 'Pause decided', pause_warning: 'Pause warning sent',
  policy_applied: 'Policy assigned', policy_deleted: 'Policy removed', policy_put: 'Policy saved', policy_tags: 'Policy written to tags', policy_unapplied: 'Policy unassigned',
  provision_failed: 'Launch failed', provisioned: 'Launched', resume_intended: 'Resume requested', resumed: 'Resumed', retry: 'Retried',
  override_added: 'Exception added', override_ended: 'Exception ended', armed: 'Armed', disarmed: 'Disarmed (dry run)',
  schedule_deleted: 'Schedule removed', schedule_put: 'Schedule saved', budget_deleted: 'Budget removed', budget_put: 'Budget saved', settings_changed: 'Settings changed',
  signal_unknown: 'Signal unknown', snooze_ended: 'Snooze ended', snoozed: 'Snoozed', start_held: 'Start deferred', start_withdrawn: 'Start withdrawn',
  status_changed: 'Status changed', stopped: 'Stopped', template_deleted: 'Template removed', template_put: 'Template saved',
  terminate_intended: 'Termination requested', terminated: 'Terminated', token_created: 'Token created', token_revoked: 'Token revoked', ttl_adopted: 'Expiry read from tag', ttl_dropped: 'Expiry cleared',
  wake_token_made: 'Wake link created', would_pause: 'Would pause (dry run)', would_resume: 'Would resume (dry run)',
}

/** Returns the display name of an action code. */
export function action(code: string): string {
  return names[code] ?? words(code).replace(/^./, (c) => c.toUpperCase())
}

export const actions = Object.entries(names).sort((a, b) => a[1].localeCompare(b[1]))

/** Returns the display name of a status: "running" for "RUNNING". */
export function status(code: string | undefined): string {
  return words(code).toLowerCase()
}

/** Display names of actor types. */
export const kinds: Record<string, string> = { person: 'a user', controller: 'lull', schedule: 'a schedule', agent: 'an agent', wake: 'a wake link', cloud: 'the cloud' }

/** Returns the display name of an actor. */
export function doer(name: string | undefined): string {
  return name === 'worker-controller' ? 'lull' : name || 'a user'
}
