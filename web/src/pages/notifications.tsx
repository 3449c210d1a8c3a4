// Notification channels and undeliverable notifications.

import { useState } from 'preact/hooks'
import { ask, Entry, List } from '../api'
import type { PageProps } from '../router'
import { useResource } from '../resource'
import { attempt, Button, Card, Dialog, Empty, Fault, Loading, Time, words } from '../parts/ui'
import { ChannelForm, channelsKey, channelsOf, putChannel, Settings, tells } from '../parts/channels'

interface Delivery { channel: string; type: string; pending: number; delivered: number; dead: number; last_delivered_at: string | null; failing_since: string | null; last_error?: string; next_try_at: string | null }
interface Letter { id: string; channel: string; event: string; entry: Entry; tries: number; error: string; died_at: string; retry_at: string | null }

export function Notifications(p: PageProps) {
  const channels = useResource<List<Delivery>>('/notifications/channels?limit=1000', { every: 5_000 })
  const dead = useResource<List<Letter>>('/notifications/dead?limit=200', { every: 10_000 })
  const settings = useResource<Settings>('/settings', { on: (e) => e.action.includes('settings'), revision: (v) => v.revision })
  const [editing, setEditing] = useState<string | null>(null)
  const [removing, setRemoving] = useState('')
  const set = channelsOf(settings.value)
  const from = settings.value?.items.find((s) => s.key === channelsKey)?.source
  const admin = p.role === 'admin' && from !== undefined && from !== 'flag' && from !== 'env'
  const one = (l: Letter) => `/notifications/dead/${encodeURIComponent(l.channel)}/${encodeURIComponent(l.id)}`
  return (
    <>
      <h1>Notifications</h1>
      <p class="headline">Notification channels and their delivery status.</p>
      {admin && <div class="actions commands"><Button kind="primary" onClick={() => setEditing('')}>Add channel</Button></div>}
      {channels.problem && <Fault problem={channels.problem} retry={channels.reload} />}
      {!channels.value ? !channels.problem && <Loading what="the channels" /> : channels.value.items.length === 0 ? <Empty title="No notification channels yet">{admin ? 'Add a mailbox, chat or webhook to warn users before a pause. A link in the warning lets them keep the worker running.' : 'An admin can add a mailbox, chat or webhook to warn users before a pause.'}</Empty> : channels.value.items.map((c) => (
        <Card key={c.channel} title={c.channel} aside={p.operator && <span>{admin && set[c.channel] && <><Button kind="plain" label={`Edit ${c.channel}`} onClick={() => setEditing(c.channel)}>Edit</Button> <Button kind="plain" label={`Remove ${c.channel}`} onClick={() => setRemoving(c.channel)}>Remove</Button> </>}<Button label={`Send test to ${c.channel}`} onClick={() => attempt(`Delivered a test to ${c.channel}.`, () => ask('POST', `/notifications/channels/${encodeURIComponent(c.channel)}/test`)).then(channels.reload)}>Send test</Button></span>}>
          {set[c.channel] && <p>{tells(set[c.channel]!).replace(/^./, (x) => x.toUpperCase())}.</p>}
          <p>{c.failing_since ? <span class="bad">Failing since <Time at={c.failing_since} as="clock" />: {c.last_error}. {c.next_try_at && <>Next retry <Time at={c.next_try_at} />.</>}</span> : c.last_delivered_at ? <>Working. Last delivery <Time at={c.last_delivered_at} />.</> : <>Nothing sent yet. Send a test to check delivery.</>}</p>
          <p class="muted small">{words(c.type)}; {c.delivered} delivered, {c.pending} pending, {c.dead} undeliverable</p>
        </Card>
      ))}
      {editing !== null && settings.value && <ChannelForm all={settings} name={editing || undefined} onClose={() => { setEditing(null); channels.reload() }} />}
      {removing && (
        <Dialog title={`Remove channel ${removing}?`} onClose={() => setRemoving('')}>
          <p>It receives no further notifications.</p>
          <div class="actions">
            <button type="button" onClick={() => setRemoving('')}>Cancel</button>
            <Button kind="danger" onClick={async () => { if (await attempt(`Removed channel ${removing}.`, () => putChannel(settings, removing, null))) setRemoving(''); channels.reload() }}>Remove</Button>
          </div>
        </Dialog>
      )}
      {(dead.value?.items ?? []).length > 0 && (
        <Card title="Undeliverable" class="flush">
          <div class="scroll" tabIndex={0} role="region" aria-label="Undeliverable notifications">
            <table class="asrows">
              <thead><tr><th scope="col">When</th><th scope="col">Channel</th><th scope="col">Event</th><th scope="col">Error</th><th scope="col"><span class="hidden">Commands</span></th></tr></thead>
              <tbody>{dead.value!.items.map((l) => (
                <tr key={l.channel + l.id}>
                  <td class="nowrap"><Time at={l.died_at} /></td><td>{l.channel}</td><td>{words(l.event)} {l.entry.worker_name}</td><td class="muted">{l.error} ({l.tries} tries)</td>
                  <td class="nowrap">{p.operator && <>{l.retry_at ? <span class="muted">retrying</span> : <Button kind="plain" label={`Retry ${l.event} on ${l.channel}`} onClick={() => attempt('Queued for delivery.', () => ask('POST', one(l) + '/retry')).then(dead.reload)}>Retry</Button>} <Button kind="plain" label={`Discard ${l.event} on ${l.channel}`} onClick={() => attempt('Discarded.', () => ask('DELETE', one(l))).then(dead.reload)}>Discard</Button></>}</td>
                </tr>
              ))}</tbody>
            </table>
          </div>
        </Card>
      )}
    </>
  )
}
