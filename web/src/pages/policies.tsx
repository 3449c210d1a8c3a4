// Policies and their assignments, exceptions and budgets.

import { useEffect, useRef, useState } from 'preact/hooks'
import { ask, Entry, List } from '../api'
import { Effect, Trial } from '../parts/effect'
import { CheckField, DurationField, SelectField, TextField } from '../parts/fields'
import { durationOf, Form, text } from '../parts/form'
import { Apply, Except } from '../parts/rules'
import type { PageProps } from '../router'
import { useResource } from '../resource'
import { Budget, Group, Override, overrideKinds, Policy, says, Schedule, scope, whom } from '../rules'
import { parseMinutes } from '../time'
import { attempt, Button, Card, Fault, Loading, Time } from '../parts/ui'

const rules = (e: Entry) => /^(policy|budget|schedule|override)_/.test(e.action)

export function Policies(p: PageProps) {
  const all = useResource<List<Policy>>('/policies?limit=1000', { on: rules })
  const groups = useResource<List<Group>>('/policy-groups', { on: rules })
  const overrides = useResource<List<Override>>('/overrides', { on: rules, every: 30_000 })
  const budgets = useResource<List<Budget>>('/budgets', { on: rules, every: 30_000 })
  const [editing, setEditing] = useState<Policy | 'new' | null>(null)
  const [applying, setApplying] = useState<Policy | null>(null)
  const [excepting, setExcepting] = useState(false)
  const admin = p.role === 'admin'
  const end = (what: string, path: string, reload: () => void) => attempt(what, () => ask('DELETE', path)).then(reload)
  return (
    <>
      <h1>Policies</h1>
      <p class="headline">When idle workers are paused. A worker's own values override its policy, which overrides its group's policy, which overrides the fleet <a href="/settings">settings</a>.</p>
      <div class="actions commands">
        {admin && <Button kind="primary" onClick={() => setEditing('new')}>New policy</Button>}
        {p.operator && <Button onClick={() => setExcepting(true)}>Add exception</Button>}
        <a class="button" href="/preview">Preview a policy</a>
      </div>
      {all.problem && <Fault problem={all.problem} retry={all.reload} />}
      {!all.value ? !all.problem && <Loading what="the policies" /> : (
        <Card title="Named policies" class="flush">
          <div class="scroll" tabIndex={0} role="region" aria-label="Named policies">
            <table class="asrows">
              <thead><tr><th scope="col">Name</th><th scope="col">Rules</th><th scope="col">Applies to</th><th scope="col"><span class="hidden">Commands</span></th></tr></thead>
              <tbody>
                {all.value.items.map((x) => (
                  <tr key={x.name}>
                    <th scope="row">{x.name}<div class="muted small">{x.description}{x.shipped && ' (built in)'}</div></th>
                    <td>{says(x)}</td>
                    <td>{(groups.value?.items ?? []).filter((g) => g.policy === x.name).map((g) => scope(g.selector)).join('; ') || <span class="muted">workers it is applied to</span>}</td>
                    <td class="nowrap">
                      {x.idle_timeout_minutes !== undefined && <a href={`/preview?policy=${encodeURIComponent(x.name)}`} aria-label={`Preview ${x.name}`}>Preview</a>}{' '}
                      {admin && <Button kind="plain" label={`Apply ${x.name}`} onClick={() => setApplying(x)}>Apply</Button>}{' '}
                      {admin && <Button kind="plain" label={`Edit ${x.name}`} onClick={() => setEditing(x)}>Edit</Button>}{' '}
                      {admin && !x.shipped && <Button kind="plain" label={`Remove ${x.name}`} onClick={() => end(`Removed ${x.name}.`, `/policies/${encodeURIComponent(x.name)}`, all.reload)}>Remove</Button>}
                    </td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        </Card>
      )}
      <Card title="Exceptions">
        {(overrides.value?.items ?? []).length === 0 ? <p class="muted">No active exceptions. Add one to keep workers running, skip a schedule or freeze workers until a set time.</p> : (
          <ul class="history">
            {overrides.value!.items.map((o) => (
              <li key={o.id}>
                <span><strong>{overrideKinds(o)}</strong> {whom(o)}, until <Time at={o.until} as="clock" /> {p.operator && <Button kind="plain" label={`End the exception for ${whom(o)}`} onClick={() => end('Ended the exception.', `/overrides/${o.id}`, overrides.reload)}>End</Button>}</span>
                <span class="muted small">by {o.by}{o.reason && `: ${o.reason}`}{new Date(o.from).getTime() > Date.now() && <>, from <Time at={o.from} as="clock" /></>}</span>
              </li>
            ))}
          </ul>
        )}
      </Card>
      <Card title="Groups" class="flush">
        {(groups.value?.items ?? []).length === 0 ? <p class="muted">No policy or schedule is assigned to a group.</p> : (
          <div class="scroll" tabIndex={0} role="region" aria-label="Groups"><table class="asrows">
            <thead><tr><th scope="col">Workers</th><th scope="col">Policy</th><th scope="col">Schedule</th><th scope="col">Priority</th><th scope="col"><span class="hidden">Remove</span></th></tr></thead>
            <tbody>{groups.value!.items.map((g) => <tr key={g.id}><th scope="row">{scope(g.selector)}</th><td>{g.policy || <span class="none">–</span>}</td><td>{g.schedule || <span class="none">–</span>}</td><td>{g.priority ?? <span class="none">0</span>}</td><td>{admin && <Button kind="plain" label={`Unassign from ${scope(g.selector)}`} onClick={() => end('Unassigned.', `/policy-groups/${g.id}`, groups.reload)}>Unassign</Button>}</td></tr>)}</tbody>
          </table></div>
        )}
      </Card>
      <Card title="Budgets">
        {(budgets.value?.items ?? []).length === 0 ? <p class="muted">No budgets limit stops or starts.</p> : (
          <ul class="history">{budgets.value!.items.map((b) => <li key={b.name}><span><strong>{b.name}</strong> <span class={b.state.free ? 'muted' : 'bad'}>{b.state.free ? 'available' : 'used up'}</span></span><span class="muted small">{b.state.sentence}</span></li>)}</ul>
        )}
      </Card>
      {editing && <Edit was={editing === 'new' ? null : editing} onClose={() => { setEditing(null); all.reload() }} />}
      {applying && <Apply what="policy" name={applying.name} text={says(applying)} onClose={() => { setApplying(null); groups.reload() }} />}
      {excepting && <Except policies={all.value?.items ?? []} onClose={() => { setExcepting(false); overrides.reload() }} />}
    </>
  )
}

function Edit(p: { was: Policy | null; onClose: () => void }) {
  const { was } = p
  const schedules = useResource<List<Schedule>>('/schedules?limit=1000')
  const form = useRef<HTMLDivElement>(null)
  const [tried, setTried] = useState<Trial | null>(null)
  // The current values, for the preview. Invalid values are not previewed.
  const changed = () => {
    const f = new FormData(form.current!.closest('form')!)
    const m = (k: string) => parseMinutes(text(f, k))
    const timeout = m('idle_timeout_minutes')
    setTried(timeout === null || timeout < 1 ? null : { timeout_minutes: Math.round(timeout), snooze_minutes: m('snooze_minutes'), warn_before_minutes: m('warn_before_minutes'), schedule: text(f, 'schedule') })
  }
  useEffect(() => { if (form.current) changed() }, [schedules.value === undefined])
  const send = async (f: FormData) => {
    const name = was?.name ?? text(f, 'name')
    const { shipped: _, updated_at: __, updated_by: ___, ...kept } = was ?? { name }
    const body: Record<string, unknown> = { ...kept, name, description: text(f, 'description') }
    delete body.schedule_since
    for (const [k, label] of [['idle_timeout_minutes', 'Idle timeout'], ['warn_before_minutes', 'Warning before pause'], ['snooze_minutes', 'Snooze after resume']] as const) {
      const m = durationOf(f, k, label)
      if (m === undefined) delete body[k]
      else body[k] = m
    }
    for (const k of ['pause_action', 'schedule']) {
      if (text(f, k) === '') delete body[k]
      else body[k] = text(f, k)
    }
    if (f.get('shadow')) body.shadow = true
    else delete body.shadow
    await ask('PUT', `/policies/${encodeURIComponent(name)}`, body)
    return `Saved ${name}.`
  }
  const duration = (label: string, name: 'idle_timeout_minutes' | 'warn_before_minutes' | 'snooze_minutes') => <DurationField id={`p-${name}`} name={name} label={label} minutes={was?.[name]} inherit="inherited" onInput={() => requestAnimationFrame(changed)} />
  if (!schedules.value) return null
  return (
    <Form title={was ? `Edit ${was.name}` : 'New policy'} submit="Save" wide onClose={p.onClose} send={send}>
      <div class="pair" ref={form}>
        {!was && <TextField id="p-name" name="name" label="Name" required max={64} />}
        <TextField id="p-description" name="description" label="Description" max={1024} value={was?.description} />
      </div>
      <p class="muted small">Leave a field empty to inherit it.</p>
      <div class="pair three">
        {duration('Idle timeout', 'idle_timeout_minutes')}
        {duration('Warning before pause', 'warn_before_minutes')}
        {duration('Snooze after resume', 'snooze_minutes')}
        <SelectField id="p-action" name="pause_action" label="Pause by" value={was?.pause_action} options={[['', 'inherited'], ['stop', 'stopping'], ['hibernate', 'hibernating'], ['auto', 'hibernating if it pays off']]} />
        <SelectField id="p-schedule" name="schedule" label="Schedule" value={was?.schedule} options={[['', 'inherited'], ...schedules.value.items.map((x): [string, string] => [x.name, x.name])]} onChange={() => requestAnimationFrame(changed)} />
      </div>
      <CheckField name="shadow" checked={was?.shadow}>Dry run: record decisions, take no action</CheckField>
      <Effect was={was} tried={tried} />
    </Form>
  )
}
