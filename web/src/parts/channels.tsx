// Forms for notification channels, which are stored in a setting.

import { useState } from 'preact/hooks'
import { ask, Setting } from '../api'
import type { Resource } from '../resource'
import { Form } from './form'

export interface Settings { items: Setting[]; revision: number }

export interface Channel {
  type: string
  url?: string
  key?: string
  relay?: string
  tls?: string
  username?: string
  password?: string
  from?: string
  to?: string[]
  to_contacts?: boolean
  events?: string[]
  digest?: string
  quiet_hours?: string
  [more: string]: unknown
}

export const channelsKey = 'notify_channels'

export function channelsOf(all: Settings | undefined): Record<string, Channel> {
  return (all?.items.find((s) => s.key === channelsKey)?.value ?? {}) as Record<string, Channel>
}

/** Summarizes a channel. */
export function tells(c: Channel): string {
  const to = [...(c.to ?? []), ...(c.to_contacts ? ["each worker's contacts"] : [])].join(', ')
  const where = c.type === 'mail' ? `email to ${to || 'no recipient'}` : `${c.type === 'slack' ? 'chat' : 'webhook'} ${c.url ?? ''}`
  return [where, c.digest ? `digest every ${c.digest}` : '', c.quiet_hours ? `quiet hours ${c.quiet_hours}` : ''].filter(Boolean).join(', ')
}

/** Saves one channel, or removes it if c is null. Other channels are kept. */
export async function putChannel(all: Resource<Settings>, name: string, c: Channel | null) {
  // Keep what another user has changed meanwhile.
  const { value: now } = await ask<Settings>('GET', '/settings')
  const next = { ...channelsOf(now) }
  if (c) next[name] = c
  else delete next[name]
  const a = await ask<Settings>('PATCH', '/settings', { [channelsKey]: next })
  all.put(a.value, a.value.revision)
}

const separated = (text: string) => text.split(/[,\s]+/).filter(Boolean)

export function ChannelForm(p: { all: Resource<Settings>; name?: string; onClose: () => void }) {
  const channels = channelsOf(p.all.value)
  const [name, setName] = useState(p.name ?? '')
  return <Fields key={name} all={p.all} channels={channels} name={name} fixed={p.name !== undefined} onName={setName} onClose={p.onClose} />
}

function Fields(p: { all: Resource<Settings>; channels: Record<string, Channel>; name: string; fixed: boolean; onName: (n: string) => void; onClose: () => void }) {
  const was: Channel | undefined = p.channels[p.name]
  const [type, setType] = useState(was?.type ?? 'mail')
  const names = Object.keys(p.channels)
  const send = async (f: FormData) => {
    const get = (n: string) => String(f.get(n) ?? '').trim()
    const name = was ? p.name : get('name')
    if (!was && p.channels[name]) throw new Error(`Channel ${name} already exists.`)
    const c: Channel = { ...was, type }
    const set = (field: string, v: unknown) => {
      if (v === '' || v === false || Array.isArray(v) && v.length === 0) delete c[field]
      else c[field] = v
    }
    const mail = type === 'mail'
    set('url', mail ? '' : get('url'))
    set('key', type === 'webhook' ? get('key') : '')
    for (const field of ['relay', 'tls', 'username', 'password', 'from']) set(field, mail ? get(field) : '')
    set('to', mail ? separated(get('to')) : [])
    set('to_contacts', mail && !!f.get('to_contacts'))
    set('events', separated(get('events')))
    set('digest', get('digest'))
    set('quiet_hours', get('quiet_hours'))
    await putChannel(p.all, name, c)
    return `Saved channel ${name}. Send a test to check delivery.`
  }
  const field = (label: string, name: string, o: { hint?: string; required?: boolean; holder?: string } = {}) => {
    const v = was?.[name]
    return <><label for={`c-${name}`}>{label}{o.hint && <span class="muted small"> {o.hint}</span>}</label><input id={`c-${name}`} name={name} required={o.required} placeholder={o.holder} maxLength={2048} defaultValue={Array.isArray(v) ? v.join(', ') : String(v ?? '')} /></>
  }
  return (
    <Form title={was ? `Edit channel ${p.name}` : 'Add channel'} submit="Save" onClose={p.onClose} send={send}>
      {!p.fixed && names.length > 0 && <><label for="c-which">Channel</label><select id="c-which" value={p.name} onChange={(e) => p.onName(e.currentTarget.value)}><option value="">New channel</option>{names.map((n) => <option key={n} value={n}>{n}</option>)}</select></>}
      {!was && field('Name', 'name', { required: true })}
      <label for="c-type">Type</label>
      <select id="c-type" value={type} onChange={(e) => setType(e.currentTarget.value)}>
        <option value="mail">Email</option>
        <option value="slack">Chat (Slack-compatible webhook)</option>
        <option value="webhook">Webhook</option>
      </select>
      {type === 'mail' ? (
        <>
          {field('To', 'to', { hint: 'addresses, separated by commas', holder: 'ops@example.org' })}
          <label class="check"><input type="checkbox" name="to_contacts" id="c-to_contacts" defaultChecked={was?.to_contacts} /> Also notify each worker's contacts, who can extend from the warning</label>
          {field('From', 'from', { required: true, holder: 'lull@example.org' })}
          {field('Mail relay', 'relay', { required: true, holder: 'mail.example.org:587' })}
          <label for="c-tls">Encryption</label>
          <select id="c-tls" name="tls"><option value="" selected={!was?.tls}>STARTTLS</option><option value="tls" selected={was?.tls === 'tls'}>Implicit TLS</option><option value="none" selected={was?.tls === 'none'}>none</option></select>
          {field('User', 'username', { hint: 'empty for none' })}
          {field('Password', 'password', { hint: 'file:PATH or env:NAME on the server' })}
        </>
      ) : (
        <>
          {field('URL', 'url', { required: true, hint: type === 'slack' ? 'a secret: file:PATH or env:NAME' : 'https://..., or file:PATH or env:NAME', holder: type === 'slack' ? 'file:/etc/lull/chat.url' : 'https://example.org/lull' })}
          {type === 'webhook' && field('Signing key', 'key', { hint: 'file:PATH or env:NAME; empty for no signature' })}
        </>
      )}
      <details>
        <summary>Events, digest and quiet hours</summary>
        <div class="stack">
          {field('Events', 'events', { hint: type === 'webhook' ? 'empty: all events' : 'empty: actionable events', holder: 'worker.pause_warning, worker.paused' })}
          {field('Digest interval', 'digest', { hint: 'such as 1h or 1d; empty sends immediately; warnings are never delayed', holder: '1d' })}
          {field('Quiet hours', 'quiet_hours', { hint: 'only warnings are sent', holder: '22:00-07:00' })}
        </div>
      </details>
    </Form>
  )
}
