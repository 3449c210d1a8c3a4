// Dialogs for one worker, opened from its page and from the fleet's rows.

import { useState } from 'preact/hooks'
import { ask, IdleStatus, List, Worker } from '../api'
import { useResource } from '../resource'
import { Policy, Schedule } from '../rules'
import { ago, clock, parseMinutes, useNow } from '../time'
import { CheckField, DurationField, Field, listOf, SelectField, TagsField, tagsOf, TextField } from './fields'
import { durationOf, Form, text } from './form'
import { attempt, Button, Dialog, Fault, Time, words } from './ui'

export type DialogKind = 'pause' | 'snooze' | 'drain' | 'edit' | 'expiry' | 'license' | 'terminate'

export const workerAt = (id: string) => `/workers/${encodeURIComponent(id)}`

/** The page of an instance in the console of AWS. */
export const awsConsole = (region: string, instance: string) => `https://${region}.console.aws.amazon.com/ec2/home?region=${region}#InstanceDetails:instanceId=${instance}`

interface Props { w: Worker; admin: boolean; onClose: () => void }

export function WorkerDialog(p: { kind: DialogKind; id: string; admin: boolean; onClose: () => void }) {
  const r = useResource<Worker>(workerAt(p.id))
  const w = r.value
  if (!w) return r.problem ? <Dialog title="Worker" onClose={p.onClose}><Fault problem={r.problem} retry={r.reload} /><div class="actions"><button type="button" onClick={p.onClose}>Close</button></div></Dialog> : null
  const Shown = { pause: Pause, snooze: Snooze, drain: Drain, edit: Edit, expiry: Expiry, license: License, terminate: Terminate }[p.kind]
  return <Shown w={w} admin={p.admin} onClose={p.onClose} />
}

const post = (w: Worker, verb: string, body?: unknown) => ask('POST', `${workerAt(w.id)}/${verb}`, body)

/** Runs a command and closes the dialog once it is accepted. */
async function run(p: Props, done: string, f: () => Promise<unknown>) {
  if (await attempt(done, f)) p.onClose()
}

function Pause(p: Props) {
  const st = useResource<IdleStatus>(`${workerAt(p.w.id)}/idle-status`).value
  const now = useNow()
  return (
    <Dialog title={`Pause ${p.w.name}?`} onClose={p.onClose}>
      <p>{st?.last_activity_at ? <>Last used {ago(st.last_activity_at, now)}.</> : <>No activity seen.</>} {st?.blocks?.some((b) => b.code === 'signal_unknown') && <strong>Whether it is in use now is unknown.</strong>}</p>
      <p>Stops the instance even if someone is using it. You can resume it at any time.</p>
      <div class="actions"><button type="button" onClick={p.onClose}>Cancel</button><Button kind="primary" onClick={() => run(p, `${p.w.name} is pausing.`, () => post(p.w, 'pause'))}>Pause</Button></div>
    </Dialog>
  )
}

function Drain(p: Props) {
  return (
    <Dialog title={`Drain ${p.w.name}?`} onClose={p.onClose}>
      <p>It takes no new work, and stops when idle or when the drain timeout expires. You can cancel the drain until then.</p>
      <div class="actions"><button type="button" onClick={p.onClose}>Cancel</button><Button kind="primary" onClick={() => run(p, `${p.w.name} is draining.`, () => post(p.w, 'drain'))}>Drain</Button></div>
    </Dialog>
  )
}

function Snooze(p: Props) {
  const now = useNow()
  const [until, setUntil] = useState('')
  const to = (d: Date) => run(p, `Snoozed ${p.w.name} until ${clock(d.getTime(), now)}.`, () => post(p.w, 'snooze', { until: d.toISOString() }))
  const hours = (n: number) => new Date(Date.now() + n * 3_600_000)
  const at = (hour: number) => { const d = new Date(now); d.setHours(hour, 0, 0, 0); if (d.getTime() <= now) d.setDate(d.getDate() + 1); return d }
  const choices: [string, () => Date][] = [['For 1 hour', () => hours(1)], ['For 2 hours', () => hours(2)], ['For 4 hours', () => hours(4)], [`Until ${clock(at(18).getTime(), now)}`, () => at(18)], [`Until ${clock(at(22).getTime(), now)}`, () => at(22)]]
  const given = until ? new Date(until) : null
  return (
    <Dialog title={`Snooze ${p.w.name}`} onClose={p.onClose}>
      {p.w.ttl_deadline && <p>It expires at <Time at={p.w.ttl_deadline} as="clock" />, even if snoozed.</p>}
      <div class="actions choices">{choices.map(([label, when]) => <Button key={label} onClick={() => to(when())}>{label}</Button>)}</div>
      <form onSubmit={(e) => { e.preventDefault(); if (given && given.getTime() > now) void to(given) }}>
        <label for="until">Or until</label>{' '}
        <input id="until" type="datetime-local" value={until} onInput={(e) => setUntil(e.currentTarget.value)} />{' '}
        <button type="submit" class="primary" aria-disabled={!given || given.getTime() <= now}>Snooze</button>
        {given && given.getTime() <= now && <p class="fault" role="alert">This time is in the past.</p>}
      </form>
      <div class="actions"><button type="button" onClick={p.onClose}>Cancel</button></div>
    </Dialog>
  )
}

/** A time for an input of the type datetime-local. */
const localInput = (d: Date) => new Date(d.getTime() - d.getTimezoneOffset() * 60_000).toISOString().slice(0, 16)

/** Sets, extends and clears the time at which the worker is stopped or terminated. */
function Expiry(p: Props) {
  const { w } = p
  const was = w.ttl_deadline ? new Date(w.ttl_deadline) : null
  const [inText, setIn] = useState('')
  const patch = (body: Record<string, unknown>, done: string) => ask('PATCH', workerAt(w.id), body).then(() => done)
  const extend = (h: number) => run(p, `Extended the expiry of ${w.name} by ${h} h.`, () => patch({ ttl_deadline: new Date(Math.max(was!.getTime(), Date.now()) + h * 3_600_000).toISOString() }, ''))
  const send = async (f: FormData) => {
    const m = durationOf(f, 'in', 'Expires in')
    const at = m !== undefined ? new Date(Date.now() + m * 60_000) : text(f, 'at') ? new Date(text(f, 'at')) : null
    if (!at) throw new Error('Enter a duration or a time.')
    if (at.getTime() <= Date.now()) throw new Error('This time is in the past.')
    return patch({ ttl_deadline: at.toISOString(), ...(p.admin ? { ttl_action: text(f, 'then') } : {}) }, `${w.name} expires at ${clock(at.getTime(), Date.now())}.`)
  }
  return (
    <Form title={`Expiry of ${w.name}`} submit="Set expiry" onClose={p.onClose} send={send}
      also={was && <Button onClick={() => run(p, `Cleared the expiry of ${w.name}.`, () => ask('PATCH', workerAt(w.id), { ttl_deadline: null }))}>Clear expiry</Button>}>
      <p>{was ? <>It is {w.ttl_action === 'terminate' ? 'terminated' : 'stopped'} at <strong><Time at={w.ttl_deadline} as="clock" /></strong>, even if in use.</> : <>No expiry is set. When a worker expires it is stopped or terminated after a warning, even if in use.</>}</p>
      {was && <div class="actions choices">{[1, 4, 24].map((h) => <Button key={h} onClick={() => extend(h)}>{h === 24 ? 'Extend by a day' : `Extend by ${h} h`}</Button>)}</div>}
      <div class="pair">
        <DurationField id="x-in" name="in" label="Expires in" onInput={setIn} />
        <Field id="x-at" label="Or at"><input id="x-at" name="at" type="datetime-local" disabled={parseMinutes(inText) !== null} defaultValue={was ? localInput(was) : ''} /></Field>
      </div>
      {p.admin && <SelectField id="x-then" name="then" label="On expiry" value={w.ttl_action || 'stop'} options={[['stop', 'stop'], ['terminate', 'terminate and delete disks']]} />}
    </Form>
  )
}

function License(p: Props) {
  const { w } = p
  const registered = w.license.status === 'registered'
  const send = async (f: FormData) => {
    await ask('POST', `${workerAt(w.id)}/license`, { token: text(f, 'token'), ...(registered ? { reregister: true } : {}) })
    return `The license of ${w.name} is being registered.`
  }
  return (
    <Form title={`CML license of ${w.name}`} submit={registered ? 'Register again' : 'Register'} onClose={p.onClose} send={send}
      also={registered && <Button onClick={() => run(p, `The license of ${w.name} is being released.`, () => ask('DELETE', `${workerAt(w.id)}/license`))}>Deregister</Button>}>
      <p>{words(w.license.status || 'unknown').replace(/^./, (c) => c.toUpperCase())}{w.license.operation_in_progress && `, ${words(w.license.operation_in_progress)} in progress`}.{w.license.last_error && <span class="bad"> {w.license.last_error}</span>}</p>
      {w.status !== 'RUNNING' && <p class="muted">CML registers and releases a license only while the worker runs.</p>}
      <TextField id="l-token" name="token" label="Smart Licensing token" required max={4096} note="The token, or file:PATH or env:NAME on the server" />
    </Form>
  )
}

/** Terminates a worker once its name has been typed. */
function Terminate(p: Props) {
  const { w } = p
  const [name, setName] = useState('')
  const licensed = w.license.status === 'registered'
  const send = async (f: FormData) => {
    await post(w, `terminate${f.get('leave') ? '?leave_license=true' : ''}`, { confirm: text(f, 'confirm') })
    return `${w.name} is being terminated.`
  }
  return (
    <Form title={`Terminate ${w.name}?`} submit="Terminate" danger ready={name.trim() === w.name} onClose={p.onClose} send={send}>
      <p>The instance and its disks are deleted. <strong>This cannot be undone.</strong> {licensed && 'Its CML license is released first.'}</p>
      {w.status === 'RUNNING' && <p>It is running{w.last_activity_at && <>, last used <Time at={w.last_activity_at} /></>}.</p>}
      <TextField id="t-confirm" name="confirm" label={`Type ${w.name} to confirm`} max={128} onInput={setName} />
      {licensed && w.status === 'STOPPED' && <CheckField name="leave">Leave the license registered (it can be released only while the worker runs)</CheckField>}
    </Form>
  )
}

/** Edits a worker's name, owner, tags and policy overrides. */
function Edit(p: Props) {
  const { w } = p
  const policies = useResource<List<Policy>>(p.admin ? '/policies?limit=1000' : null)
  const schedules = useResource<List<Schedule>>(p.admin ? '/schedules?limit=1000' : null)
  const send = async (f: FormData) => {
    const body: Record<string, unknown> = {}
    const put = (key: string, next: unknown, was: unknown, none: unknown = null) => {
      if (JSON.stringify(next ?? '') !== JSON.stringify(was ?? '')) body[key] = next === '' || next === undefined ? none : next
    }
    put('name', text(f, 'name'), w.name)
    put('owner', text(f, 'owner'), w.owner)
    put('contacts', listOf(text(f, 'contacts')), w.contacts ?? [])
    put('tags', tagsOf(text(f, 'tags')), w.tags ?? {})
    put('idle_timeout_minutes', durationOf(f, 'idle_timeout', 'Idle timeout'), w.idle_timeout_minutes)
    put('snooze_minutes', durationOf(f, 'snooze', 'Snooze after resume'), w.snooze_minutes)
    put('pause_action', text(f, 'pause_action'), w.pause_action)
    if (p.admin) {
      for (const key of ['schedule', 'policy', 'cml_username'] as const) put(key, text(f, key), w[key])
      put('activity_sources', ['cml', 'agent', 'cloudwatch'].filter((s) => f.get(`source-${s}`)), w.activity_sources ?? [])
      put('tls_insecure', !!f.get('tls_insecure'), !!w.tls_insecure)
      put('tls_pin', text(f, 'tls_pin'), w.tls_pin)
      if (text(f, 'cml_password')) body.cml_password = text(f, 'cml_password')
    }
    if (Object.keys(body).length === 0) throw new Error('No changes to save.')
    await ask('PATCH', workerAt(w.id), body)
    return `Saved ${text(f, 'name')}.`
  }
  if (p.admin && (!policies.value || !schedules.value)) return null
  const options = (items: { name: string }[] | undefined, none: string): [string, string][] => [['', none], ...(items ?? []).map((x): [string, string] => [x.name, x.name])]
  return (
    <Form title={`Edit ${w.name}`} submit="Save" wide onClose={p.onClose} send={send}>
      <div class="pair">
        <TextField id="e-name" name="name" label="Name" required max={128} value={w.name} />
        <TextField id="e-owner" name="owner" label="Owner" value={w.owner} holder="alice@example.org" />
      </div>
      <TextField id="e-contacts" name="contacts" label="Contacts" max={2048} value={(w.contacts ?? []).join(', ')} note="Email addresses for warnings, separated by commas" />
      <TagsField id="e-tags" name="tags" label="Tags" tags={w.tags} />
      <h3>Overrides</h3>
      <p class="muted small">Leave a field empty to inherit it.</p>
      <div class="pair">
        <DurationField id="e-idle_timeout" name="idle_timeout" label="Idle timeout" minutes={w.idle_timeout_minutes || undefined} inherit="inherited" />
        <DurationField id="e-snooze" name="snooze" label="Snooze after resume" minutes={w.snooze_minutes} inherit="inherited" />
        <SelectField id="e-pause_action" name="pause_action" label="Pause by" value={w.pause_action} options={[['', 'inherited'], ['stop', 'stopping'], ['hibernate', 'hibernating'], ['auto', 'hibernating if it pays off']]} />
        {p.admin && <SelectField id="e-schedule" name="schedule" label="Schedule" value={w.schedule} options={options(schedules.value?.items, 'inherited')} />}
        {p.admin && <SelectField id="e-policy" name="policy" label="Policy" value={w.policy} options={options(policies.value?.items, 'inherited')} />}
      </div>
      {p.admin && (
        <details>
          <summary>Activity sources and CML access</summary>
          <div class="stack">
            <fieldset class="checks"><legend>Activity sources</legend>
              {['cml', 'agent', 'cloudwatch'].map((s) => <CheckField key={s} name={`source-${s}`} checked={w.activity_sources?.includes(s)}>{{ cml: 'CML', agent: 'agent', cloudwatch: 'CloudWatch' }[s]}</CheckField>)}
              <span class="muted small">Inherited if none is selected</span>
            </fieldset>
            <CMLAccess username={w.cml_username} pin={w.tls_pin} insecure={w.tls_insecure} kept />
          </div>
        </details>
      )}
    </Form>
  )
}

/** Fields for the server's access to CML. */
export function CMLAccess(p: { username?: string; pin?: string; insecure?: boolean; kept?: boolean }) {
  return (
    <>
      <div class="pair">
        <TextField id="m-username" name="cml_username" label="CML user" value={p.username} holder="fleet setting" />
        <TextField id="m-password" name="cml_password" label="CML password" max={1024} holder={p.kept ? 'unchanged' : 'fleet setting'} note="file:PATH or env:NAME on the server, or the password" />
      </div>
      <TextField id="m-pin" name="tls_pin" label="Certificate pin" max={128} value={p.pin} note="SHA-256 of the console's certificate; empty uses the system's trust store" />
      <CheckField id="m-insecure" name="tls_insecure" checked={p.insecure}>Accept any certificate (insecure)</CheckField>
    </>
  )
}

/** Returns the fields of CMLAccess that were filled in. */
export function cmlAccess(f: FormData): Record<string, unknown> {
  const out: Record<string, unknown> = {}
  for (const k of ['cml_username', 'cml_password', 'tls_pin']) if (text(f, k)) out[k] = text(f, k)
  if (f.get('tls_insecure')) out.tls_insecure = true
  return out
}

