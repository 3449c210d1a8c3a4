// Dialogs that launch and import workers and connect regions.

import { useRef, useState } from 'preact/hooks'
import { ask, Discovered, List, Setting, Template, Worker } from '../api'
import { useResource } from '../resource'
import { go } from '../router'
import { Policy } from '../rules'
import { CheckField, DurationField, listOf, SelectField, TagsField, tagsOf, TextField } from './fields'
import { durationOf, Form, text } from './form'
import { Dialog, Fault, say } from './ui'
import { CMLAccess, cmlAccess, workerAt } from './workerdialogs'

const choices = (items: { name: string }[] | undefined, none?: string): [string, string][] => [...(none === undefined ? [] : [['', none] as [string, string]]), ...(items ?? []).map((x): [string, string] => [x.name, x.name])]

function useTemplates() {
  const r = useResource<List<Template>>('/templates?limit=1000')
  return { ...r, usable: (r.value?.items ?? []).filter((t) => t.enabled !== false) }
}

/** Shown when there is no template to launch from. */
function NoTemplate(p: { onClose: () => void }) {
  return (
    <Dialog title="No template yet" onClose={p.onClose}>
      <p>A template defines the instance type and image of new workers.</p>
      <div class="actions"><button type="button" onClick={p.onClose}>Cancel</button><a class="button" href="/templates" onClick={p.onClose}>Create a template</a></div>
    </Dialog>
  )
}

export function CreateWorker(p: { template?: string; onClose: () => void }) {
  const templates = useTemplates()
  const policies = useResource<List<Policy>>('/policies?limit=1000')
  const [name, setName] = useState(p.template ?? '')
  if (templates.problem) return <Dialog title="New worker" onClose={p.onClose}><Fault problem={templates.problem} retry={templates.reload} /></Dialog>
  if (!templates.value || !policies.value) return null
  if (templates.usable.length === 0) return <NoTemplate onClose={p.onClose} />
  const chosen = templates.usable.find((t) => t.name === name) ?? templates.usable[0]!
  const send = async (f: FormData) => {
    const body: Record<string, unknown> = { name: text(f, 'name'), template_name: chosen.name }
    for (const k of ['aws_region', 'owner', 'policy']) if (text(f, k)) body[k] = text(f, k)
    if (listOf(text(f, 'contacts')).length > 0) body.contacts = listOf(text(f, 'contacts'))
    const tags = tagsOf(text(f, 'tags'))
    if (Object.keys(tags).length > 0) body.tags = tags
    const timeout = durationOf(f, 'idle_timeout', 'Idle timeout'), expires = durationOf(f, 'expires', 'Expires in')
    if (timeout !== undefined) body.idle_timeout_minutes = timeout
    if (expires !== undefined) Object.assign(body, { ttl_deadline: new Date(Date.now() + expires * 60_000).toISOString(), ttl_action: text(f, 'ttl_action') })
    const { value } = await ask<Worker>('POST', '/workers', body)
    go(workerAt(value.id))
    return `${value.name} is being launched.`
  }
  return (
    <Form title="New worker" submit="Launch" wide onClose={p.onClose} send={send}>
      <div class="pair">
        <TextField id="n-name" name="name" label="Name" required max={128} />
        <SelectField id="n-template" name="template" label="Template" value={chosen.name} options={choices(templates.usable)} onChange={setName} note={[chosen.instance_type, chosen.description].filter(Boolean).join(', ')} />
        <TextField id="n-region" name="aws_region" label="Region" max={32} holder="default region" />
        <TextField id="n-owner" name="owner" label="Owner" holder="alice@example.org" />
      </div>
      <TextField id="n-contacts" name="contacts" label="Contacts" max={2048} note="Email addresses for warnings, separated by commas" />
      <details>
        <summary>Policy, expiry and tags</summary>
        <div class="stack">
          <div class="pair">
            <SelectField id="n-policy" name="policy" label="Policy" options={choices(policies.value.items, 'inherited')} />
            <DurationField id="n-timeout" name="idle_timeout" label="Idle timeout" inherit="inherited" />
            <DurationField id="n-expires" name="expires" label="Expires in" inherit="never" />
            <SelectField id="n-then" name="ttl_action" label="On expiry" value="stop" options={[['stop', 'stop'], ['terminate', 'terminate and delete disks']]} />
          </div>
          <TagsField id="n-tags" name="tags" label="Tags" />
        </div>
      </details>
    </Form>
  )
}

/** Adds a worker of a template. */
export function ScaleUp(p: { template?: string; onClose: () => void }) {
  const templates = useTemplates()
  if (!templates.value) return null
  if (templates.usable.length === 0) return <NoTemplate onClose={p.onClose} />
  const send = async (f: FormData) => {
    const body: Record<string, unknown> = { template: text(f, 'template') }
    for (const k of ['aws_region', 'reason']) if (text(f, k)) body[k] = text(f, k)
    const { value } = await ask<Worker>('POST', '/workers/scale-up', body)
    go(workerAt(value.id))
    return value.ec2_instance_id ? `${value.name} is being started.` : `${value.name} is being launched.`
  }
  return (
    <Form title="Scale up" submit="Add worker" onClose={p.onClose} send={send}>
      <p>Starts a stopped worker of the template, or launches one if there is none.</p>
      <SelectField id="u-template" name="template" label="Template" value={p.template} options={choices(templates.usable)} />
      <TextField id="u-region" name="aws_region" label="Region" max={32} holder="default region" />
      <TextField id="u-reason" name="reason" label="Reason" />
    </Form>
  )
}

/** Imports discovered instances, or one by ID. */
export function ImportWorkers(p: { found: Discovered[]; onClose: (imported: number) => void }) {
  const policies = useResource<List<Policy>>('/policies?limit=1000')
  const [done, setDone] = useState<string[]>([])
  const count = useRef(0) // a send that ends reads the newest
  const left = p.found.filter((d) => !done.includes(d.ec2_instance_id))
  const one = p.found.length < 2
  if (!policies.value) return null
  const send = async (f: FormData) => {
    const shared: Record<string, unknown> = cmlAccess(f)
    for (const k of ['owner', 'policy']) if (text(f, k)) shared[k] = text(f, k)
    const list = left.length > 0 ? left : [{ ec2_instance_id: text(f, 'instance'), aws_region: text(f, 'aws_region'), state: '' }]
    for (const d of list) {
      const name = (one && text(f, 'name')) || d.name || d.ec2_instance_id
      const { value } = await ask<Worker>('POST', '/workers/import', { ...shared, name, aws_region: d.aws_region, ec2_instance_id: d.ec2_instance_id, ...(d.account ? { account: d.account } : {}) })
      if (f.get('arm')) await ask('POST', `${workerAt(value.id)}/arm`)
      setDone((all) => [...all, d.ec2_instance_id])
      count.current++
    }
    const arm = f.get('arm') ? '.' : ', in dry-run mode.'
    return list.length === 1 ? `Imported${arm}` : `Imported ${list.length} workers${arm}`
  }
  return (
    <Form title={p.found.length > 1 ? `Import ${left.length} instances` : 'Import an instance'} submit="Import" wide onClose={() => p.onClose(count.current)} send={send}>
      {p.found.length > 1 && <p>{left.slice(0, 8).map((d) => d.name || d.ec2_instance_id).join(', ')}{left.length > 8 && ` and ${left.length - 8} more`}. {done.length > 0 && `${done.length} already imported.`}</p>}
      <div class="pair">
        {p.found.length === 0 && <><TextField id="i-instance" name="instance" label="Instance" required max={32} holder="i-0123456789abcdef0" /><TextField id="i-region" name="aws_region" label="Region" required max={32} /></>}
        {one && <TextField id="i-name" name="name" label="Name" required max={128} value={p.found[0]?.name || p.found[0]?.ec2_instance_id} />}
        <TextField id="i-owner" name="owner" label="Owner" holder="alice@example.org" />
        <SelectField id="i-policy" name="policy" label="Policy" options={choices(policies.value.items, 'inherited')} />
      </div>
      <details><summary>CML access</summary><div class="stack"><CMLAccess /></div></details>
      <CheckField id="i-arm" name="arm">Arm now, so that lull may pause {one ? 'it' : 'them'}. Otherwise {one ? 'it stays' : 'they stay'} in dry-run mode.</CheckField>
    </Form>
  )
}

interface RegionConfig { security_group_ids?: string[]; subnet_id?: string; key_name?: string; [more: string]: unknown }

/** Adds a region to the scan, with the network that workers are launched into. */
export function ConnectRegion(p: { onClose: () => void }) {
  const settings = useResource<{ items: Setting[] }>('/settings')
  if (!settings.value) return settings.problem ? <Dialog title="Connect a region" onClose={p.onClose}><Fault problem={settings.problem} retry={settings.reload} /></Dialog> : null
  const send = async (f: FormData) => {
    const { value: now } = await ask<{ items: Setting[] }>('GET', '/settings')
    const of = <T,>(key: string, none: T) => (now.items.find((s) => s.key === key)?.value as T | null | undefined) ?? none
    const region = text(f, 'region')
    const body: Record<string, unknown> = {}
    const scanned = of<string[]>('discovery_regions', [])
    if (scanned.length > 0 && !scanned.includes(region)) body.discovery_regions = [...scanned, region]
    const network: RegionConfig = { ...of<Record<string, RegionConfig>>('aws_region_configs', {})[region] }
    if (listOf(text(f, 'groups')).length > 0) network.security_group_ids = listOf(text(f, 'groups'))
    for (const k of ['subnet_id', 'key_name'] as const) if (text(f, k)) network[k] = text(f, k)
    body.aws_region_configs = { ...of<Record<string, RegionConfig>>('aws_region_configs', {}), [region]: network }
    if (of<string>('discovery_import', '') === 'off') body.discovery_import = 'confirm'
    await ask('PATCH', '/settings', body)
    say(`Connected ${region}. The next scan includes it.`)
    return ''
  }
  return (
    <Form title="Connect a region" submit="Connect" onClose={p.onClose} send={send}>
      <p>lull scans the region with the server's credentials. A network is needed only to launch workers there.</p>
      <TextField id="r-region" name="region" label="Region" required max={32} holder="eu-north-1" />
      <details><summary>Network of launched workers</summary><div class="stack">
        <TextField id="r-subnet" name="subnet_id" label="Subnet" max={64} holder="subnet-…" />
        <TextField id="r-groups" name="groups" label="Security groups" max={1024} note="Separated by commas" />
        <TextField id="r-key" name="key_name" label="Key pair" max={255} />
      </div></details>
    </Form>
  )
}
