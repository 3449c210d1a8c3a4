// Notifications: whether they arrive, and those that did not.

import { ask, Entry, List } from '../api'
import type { PageProps } from '../app'
import { useResource } from '../resource'
import { attempt, Button, Card, Empty, Fault, Loading, Time, words } from '../ui'

interface Delivery { channel: string; type: string; pending: number; delivered: number; dead: number; last_delivered_at: string | null; failing_since: string | null; last_error?: string; next_try_at: string | null }
interface Letter { id: string; channel: string; event: string; entry: Entry; tries: number; error: string; died_at: string; retry_at: string | null }

export function Notifications(p: PageProps) {
  const channels = useResource<List<Delivery>>('/notifications/channels?limit=1000', { every: 5_000 })
  const dead = useResource<List<Letter>>('/notifications/dead?limit=200', { every: 10_000 })
  const one = (l: Letter) => `/notifications/dead/${encodeURIComponent(l.channel)}/${encodeURIComponent(l.id)}`
  return (
    <>
      <h1>Notifications</h1>
      <p class="headline">Who is told of what happens, and whether it arrived.</p>
      {channels.problem && <Fault problem={channels.problem} retry={channels.reload} />}
      {!channels.value ? !channels.problem && <Loading what="the channels" /> : channels.value.items.length === 0 ? <Empty title="There is no channel yet.">The setting <code>notify_channels</code> names webhooks, chats and mailboxes.</Empty> : channels.value.items.map((c) => (
        <Card key={c.channel} title={c.channel} aside={p.operator && <Button label={`Send a test to ${c.channel}`} onClick={() => attempt(`A test arrived at ${c.channel}.`, () => ask('POST', `/notifications/channels/${encodeURIComponent(c.channel)}/test`)).then(channels.reload)}>Send a test</Button>}>
          <p>{c.failing_since ? <span class="bad">Nothing arrives since <Time at={c.failing_since} as="clock" />: {c.last_error}. {c.next_try_at && <>Tried again <Time at={c.next_try_at} />.</>}</span> : <>Works. The last one arrived <Time at={c.last_delivered_at} none="never" />.</>}</p>
          <p class="muted small">{words(c.type)}; {c.delivered} delivered, {c.pending} waiting, {c.dead} given up</p>
        </Card>
      ))}
      {(dead.value?.items ?? []).length > 0 && (
        <Card title="Given up" class="flush">
          <div class="scroll" tabIndex={0} role="region" aria-label="Given up">
            <table>
              <thead><tr><th scope="col">When</th><th scope="col">Channel</th><th scope="col">Event</th><th scope="col">Why</th><th scope="col"><span class="hidden">Commands</span></th></tr></thead>
              <tbody>{dead.value!.items.map((l) => (
                <tr key={l.channel + l.id}>
                  <td class="nowrap"><Time at={l.died_at} /></td><td>{l.channel}</td><td>{words(l.event)} {l.entry.worker_name}</td><td class="muted">{l.error} ({l.tries} tries)</td>
                  <td class="nowrap">{p.operator && <>{l.retry_at ? <span class="muted">sent again</span> : <Button kind="plain" label={`Send ${l.event} of ${l.channel} again`} onClick={() => attempt('It is sent again.', () => ask('POST', one(l) + '/retry')).then(dead.reload)}>Send again</Button>} <Button kind="plain" label={`Drop ${l.event} of ${l.channel}`} onClick={() => attempt('It is dropped.', () => ask('DELETE', one(l))).then(dead.reload)}>Drop</Button></>}</td>
                </tr>
              ))}</tbody>
            </table>
          </div>
        </Card>
      )}
    </>
  )
}
