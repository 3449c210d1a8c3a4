// Templates for launching workers.

import { useState } from 'preact/hooks'
import { ask, List, Template } from '../api'
import { CheckField, DurationField, SelectField, TextField } from '../parts/fields'
import { durationOf, Form, text } from '../parts/form'
import { CreateWorker, ScaleUp } from '../parts/launch'
import { attempt, Button, Dialog, Empty, Fault, Loading } from '../parts/ui'
import { CMLAccess, cmlAccess } from '../parts/workerdialogs'
import { useResource } from '../resource'
import type { PageProps } from '../router'
import { minutes } from '../time'

type Open = { kind: 'edit' | 'launch' | 'scale' | 'delete'; of?: Template } | null

export function Templates(p: PageProps) {
  const all = useResource<List<Template>>('/templates?limit=1000', { on: (e) => e.action.startsWith('template_') })
  const [open, setOpen] = useState<Open>(null)
  const admin = p.role === 'admin'
  const close = () => { setOpen(null); all.reload() }
  const list = all.value?.items ?? []
  return (
    <>
      <h1>Templates</h1>
      <p class="headline">Instance type, image and idle settings for new workers.</p>
      {admin && <div class="actions commands"><Button kind="primary" onClick={() => setOpen({ kind: 'edit' })}>New template</Button></div>}
      {all.problem && <Fault problem={all.problem} retry={all.reload} />}
      {!all.value ? !all.problem && <Loading what="the templates" /> : list.length === 0 ? <Empty title="No templates yet">{admin ? 'Create one to launch workers from here.' : 'Only admins can create templates.'}</Empty> : (
        <div class="card flush scroll" tabIndex={0} role="region" aria-label="Templates">
          <table class="asrows">
            <thead><tr><th scope="col">Template</th><th scope="col">Instance type</th><th scope="col">Image</th><th scope="col">Idle detection</th><th scope="col"><span class="hidden">Commands</span></th></tr></thead>
            <tbody>
              {list.map((t) => (
                <tr key={t.name} class={t.enabled === false ? 'over' : ''}>
                  <th scope="row">{t.name}{t.enabled === false && <span class="muted"> disabled</span>}<div class="muted small">{t.description}</div></th>
                  <td>{t.instance_type}<div class="muted small">{[t.capacity?.cpu_cores && `${t.capacity.cpu_cores} CPU`, t.capacity?.memory_gb && `${t.capacity.memory_gb} GB`, t.capacity?.storage_gb && `${t.capacity.storage_gb} GB disk`, t.capacity?.max_nodes && `${t.capacity.max_nodes} nodes`].filter(Boolean).join(', ')}</div></td>
                  <td><code>{t.ami_name_filter}</code></td>
                  <td>{idle(t)}</td>
                  <td class="nowrap">
                    {admin && <>{t.enabled !== false && <><Button kind="plain" label={`Launch a worker from ${t.name}`} onClick={() => setOpen({ kind: 'launch', of: t })}>Launch</Button>{' '}<Button kind="plain" label={`Scale up ${t.name}`} onClick={() => setOpen({ kind: 'scale', of: t })}>Scale up</Button>{' '}</>}
                      <Button kind="plain" label={`Edit ${t.name}`} onClick={() => setOpen({ kind: 'edit', of: t })}>Edit</Button>{' '}<Button kind="plain" label={`Remove ${t.name}`} onClick={() => setOpen({ kind: 'delete', of: t })}>Remove</Button></>}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {open?.kind === 'edit' && <Edit was={open.of ?? null} onClose={close} />}
      {open?.kind === 'launch' && <CreateWorker template={open.of!.name} onClose={close} />}
      {open?.kind === 'scale' && <ScaleUp template={open.of!.name} onClose={close} />}
      {open?.kind === 'delete' && (
        <Dialog title={`Remove ${open.of!.name}?`} onClose={close}>
          <p>Existing workers are not affected. No new workers can be launched from it.</p>
          <div class="actions"><button type="button" onClick={close}>Cancel</button><Button kind="danger" onClick={async () => { if (await attempt(`Removed ${open.of!.name}.`, () => ask('DELETE', `/templates/${encodeURIComponent(open.of!.name)}`))) close() }}>Remove</Button></div>
        </Dialog>
      )}
    </>
  )
}

function idle(t: Template): string {
  const d = t.idle_detection
  if (!d || d.enabled === undefined && !d.hibernate_threshold_minutes) return 'inherited'
  if (d.enabled === false) return 'off'
  return d.hibernate_threshold_minutes ? `pauses after ${minutes(d.hibernate_threshold_minutes)}` : 'on'
}

function Edit(p: { was: Template | null; onClose: () => void }) {
  const { was } = p
  const [on, setOn] = useState(was?.idle_detection?.enabled ?? true)
  const send = async (f: FormData) => {
    const name = was?.name ?? text(f, 'name')
    const body: Record<string, unknown> = { instance_type: text(f, 'instance_type'), ami_name_filter: text(f, 'ami_name_filter'), enabled: !!f.get('enabled'), hibernation: text(f, 'hibernation'), agent: !!f.get('agent'), ...cmlAccess(f) }
    for (const k of ['description', 'iam_instance_profile', 'user_data']) if (text(f, k)) body[k] = text(f, k)
    const numbers = (keys: string[]) => Object.fromEntries(keys.filter((k) => text(f, k)).map((k) => [k, Number(text(f, k))]))
    body.capacity = numbers(['cpu_cores', 'memory_gb', 'storage_gb', 'max_nodes'])
    const warn = durationOf(f, 'warn', 'Warn when idle for'), pause = durationOf(f, 'pause', 'Pause when idle for'), every = durationOf(f, 'every', 'Check every')
    body.idle_detection = { ...was?.idle_detection, enabled: on, idle_threshold_minutes: warn, hibernate_threshold_minutes: pause, check_interval_minutes: every }
    for (const k of ['root_volume', 'tls_ca', 'activity_sources', 'accepted_risks'] as const) if (was?.[k]) body[k] = was[k] // edited elsewhere
    await ask('PUT', `/templates/${encodeURIComponent(name)}`, body)
    return `Saved ${name}.`
  }
  const number = (label: string, key: 'cpu_cores' | 'memory_gb' | 'storage_gb' | 'max_nodes') => <TextField id={`t-${key}`} name={key} label={label} type="number" min={0} value={was?.capacity?.[key] ? String(was.capacity[key]) : ''} />
  return (
    <Form title={was ? `Edit ${was.name}` : 'New template'} submit="Save" wide onClose={p.onClose} send={send}>
      <div class="pair">
        {!was && <TextField id="t-name" name="name" label="Name" required max={64} />}
        <TextField id="t-description" name="description" label="Description" max={1024} value={was?.description} />
        <TextField id="t-instance_type" name="instance_type" label="Instance type" required max={64} value={was?.instance_type} holder="m5.2xlarge" />
        <TextField id="t-ami" name="ami_name_filter" label="Image name" required max={256} value={was?.ami_name_filter} holder="cisco-cml2.7*" note="Uses the newest matching image" />
      </div>
      <h3>Capacity</h3>
      <div class="pair four">{number('CPU cores', 'cpu_cores')}{number('Memory, GB', 'memory_gb')}{number('Disk, GB', 'storage_gb')}{number('Maximum nodes', 'max_nodes')}</div>
      <h3>Idle detection</h3>
      <CheckField name="idle" checked={on} onChange={setOn}>Pause workers of this template when idle</CheckField>
      {on && <div class="pair three">
        <DurationField id="t-warn" name="warn" label="Warn when idle for" minutes={was?.idle_detection?.idle_threshold_minutes || undefined} inherit="inherited" />
        <DurationField id="t-pause" name="pause" label="Pause when idle for" minutes={was?.idle_detection?.hibernate_threshold_minutes || undefined} inherit="inherited" />
        <DurationField id="t-every" name="every" label="Check every" minutes={was?.idle_detection?.check_interval_minutes || undefined} inherit="inherited" />
      </div>}
      <details><summary>Launch options and CML access</summary><div class="stack">
        <div class="pair">
          <SelectField id="t-hibernation" name="hibernation" label="Hibernation" value={was?.hibernation || 'auto'} options={[['auto', 'if the policy allows it'], ['on', 'always'], ['off', 'never']]} />
          <TextField id="t-profile" name="iam_instance_profile" label="IAM instance profile" max={256} value={was?.iam_instance_profile} />
        </div>
        <CheckField name="agent" checked={was?.agent}>Install and enroll the agent</CheckField>
        <label for="t-user_data">User data</label><textarea id="t-user_data" name="user_data" rows={3} maxLength={16384} defaultValue={was?.user_data} />
        <CMLAccess username={was?.cml_username} pin={was?.tls_pin} insecure={was?.tls_insecure} kept={!!was} />
      </div></details>
      <CheckField name="enabled" checked={was?.enabled ?? true}>Enabled: workers can be launched from this template</CheckField>
    </Form>
  )
}
