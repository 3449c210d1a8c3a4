// The explanation of a state: question, answer and evidence, as in lull why.

import { ComponentChildren } from 'preact'
import { useEffect, useRef } from 'preact/hooks'
import { action, doer, status } from '../actions'
import { Account, Block, Entry, SignalReading, Turn } from '../api'
import { figure } from '../evidence'
import { Resource, useResource } from '../resource'
import { clock, local, span, useNow } from '../time'
import { Card, Fault, Loading, Time, words } from './ui'

/** Parses a time of a URL; null if there is none. */
export function moment(text: string | null): number | null {
  const t = new Date(text ?? '').getTime()
  return Number.isNaN(t) ? null : t
}

/** Returns the URL of this page at a past time, to the second. */
export function pathAt(at: number): string {
  return `${location.pathname}?at=${new Date(Math.floor(at / 1000) * 1000).toISOString().replace('.000Z', 'Z')}`
}

/** The question and its answer. */
export function Answer(p: { why: Pick<Resource<Account>, 'value' | 'problem' | 'reload'> }) {
  const y = p.why.value
  const now = useNow()
  if (!y) return p.why.problem ? <Fault problem={p.why.problem} retry={p.why.reload} what="Cannot load the explanation." /> : <Loading what="the explanation" />
  return (
    <p class="answer" role="status">
      <span class="question">{question(y)}</span> {local(y.answer, now)}
    </p>
  )
}

/** Explains the state at a past time. path is that of the why operation. */
export function Then(p: { path: string; at: number; onEnd: () => void }) {
  const r = useResource<Account & { last?: Entry[] | null }>(`${p.path}?at=${encodeURIComponent(new Date(p.at).toISOString())}`)
  const head = useRef<HTMLDivElement>(null)
  useEffect(() => head.current?.scrollIntoView({ block: 'nearest' }), [p.at, r.value === undefined])
  const back = <button type="button" class="plain" onClick={p.onEnd}>Close</button>
  return (
    <div ref={head} class="past">
      {r.problem ? <Card title="Explanation" aside={back}><Fault problem={r.problem} retry={r.reload} what="Cannot load the explanation." /></Card>
        : !r.value ? <Loading what="the recorded state" />
        : <Grounds y={r.value} title={`Explanation for ${clock(p.at, Date.now())}`} aside={back} last={r.value.last} />}
    </div>
  )
}

export function Grounds(p: { y: Account; title: string; aside?: ComponentChildren; now?: boolean; last?: Entry[] | null }) {
  const { y } = p
  const now = useNow()
  const blocks = y.verdict?.blocks ?? [], signals = y.signals ?? [], leases = y.leases ?? []
  const runs = ['RUNNING', 'DRAINING', 'running', ''].includes(y.state)
  // A stopped worker has no blocks.
  const down = p.now && !runs && y.state === y.state.toUpperCase()
  const bare = down && !y.checked // there is no record of the check that stopped it
  return (
    <Card title={p.title} aside={p.aside}>
      {!p.now && <p class="answer then" role="status"><span class="question">{question(y)}</span> {local(y.answer, now)}</p>}
      {y.checked && (
        <p class="muted small">
          From the check at <Time at={y.checked.at} as="clock" />
          {y.checked.since !== y.checked.at && <>; unchanged since the check at <Time at={y.checked.since} as="clock" /></>}
          {y.checked.until && <>, and unchanged until the check at <Time at={y.checked.until} as="clock" /></>}.
        </p>
      )}
      {y.checked?.engine_differs && <p class="fault">This version of lull evaluates these readings differently than the recorded one{y.checked.was?.length ? `: ${y.checked.was.join(', ')}` : ''}.</p>}
      {!bare && <h3>{down ? 'Signals when it was stopped' : 'Signals'}</h3>}
      {bare ? null : signals.length === 0 ? <p class="muted">{p.now && runs ? 'The server with its live readings is unreachable. Unknown never counts as idle.' : 'No signals recorded.'}</p> : (
        <div class="scroll" tabIndex={0} role="region" aria-label="Signals">
          <table>
            <thead><tr><th scope="col">Signal</th><th scope="col">State</th><th scope="col">Value</th><th scope="col">Threshold</th><th scope="col">Window</th><th scope="col">Age</th></tr></thead>
            <tbody>{signals.map((s) => <Signal key={s.signal} s={s} now={p.now && !down} />)}</tbody>
          </table>
        </div>
      )}
      {!down && <h3>What prevent{p.now ? 's' : 'ed'} a pause</h3>}
      {down ? null : !y.verdict ? <p class="muted">{p.now ? 'Nothing.' : 'Unknown.'}</p> : blocks.length === 0 ? <p>{runs ? `Nothing: it ${p.now ? 'is' : 'was'} about to be paused.` : 'Nothing.'}</p> : (
        <ul class="blocks">
          {blocks.map((b, i) => <li key={i}>{local(b.sentence, now)}{b.until && <span class="muted"> {p.now ? 'Ends' : 'Was due to end at'} <Time at={b.until} as={p.now ? 'ago' : 'clock'} />.</span>}</li>)}
        </ul>
      )}
      {!down && <Codes list={blocks} />}
      {leases.length > 0 && <><h3>Leases</h3><ul class="blocks">{leases.map((l, i) => <li key={i}>{l.holder}{l.reason && `: ${l.reason}`}<span class="muted">, until <Time at={l.expires_at} as="clock" /></span></li>)}</ul></>}
      {(!p.now || down) && (y.paused || y.resumed) && <p class="small"><LastTurn what="Last paused" t={y.paused} /> <LastTurn what="Last resumed" t={y.resumed} /></p>}
      {(y.change ?? []).length > 0 && <><h3>{down ? 'How to resume it' : `What would ${p.now ? 'change' : 'have changed'} this`}</h3><ul class="blocks">{y.change!.map((c, i) => <li key={i}>{local(sentence(c), now)}</li>)}</ul></>}
      {(p.last ?? []).length > 0 && (
        <>
          <h3>Earlier events</h3>
          <ul class="blocks">{p.last!.slice(0, 5).map((e, i) => <li key={i}>{action(e.action)}{e.from && e.to && e.from !== e.to && `, ${status(e.from)} to ${status(e.to)}`} <span class="muted">{clock(e.at, now)} by {doer(e.by.name)}{e.reason && `, ${words(e.reason)}`}</span></li>)}</ul>
        </>
      )}
      {(y.missing ?? []).map((m, i) => <p key={i} class="muted small">No records from {clock(m.from, now)} to {clock(m.to, now)}: {[m.server, m.why].filter(Boolean).join(' ')}</p>)}
    </Card>
  )
}

/** The codes of blocks, for scripts and reports. */
export function Codes(p: { list: Block[] }) {
  if (p.list.length === 0) return null
  return (
    <details class="codes">
      <summary>Details</summary>
      <ul class="blocks">{p.list.map((b, i) => <li key={i}><code class="code">{b.code}</code>{b.signal && <span class="muted small"> {b.signal}</span>}{b.holder && <span class="muted small"> {b.holder}</span>}</li>)}</ul>
    </details>
  )
}

const sentence = (text: string) => text.replace(/^[a-z]+(?= )/, (word) => word[0]!.toUpperCase() + word.slice(1))

export function question(y: { question: string }): string {
  const text = y.question.replace(/[A-Z]{4,}/g, (state) => state.toLowerCase())
  return text.charAt(0).toUpperCase() + text.slice(1) + '?'
}

function LastTurn(p: { what: string; t: Turn | undefined }) {
  return p.t ? <span>{p.what} <Time at={p.t.at} as="clock" /> by {doer(p.t.by)}{p.t.reason && ` (${words(p.t.reason)})`}.</span> : null
}

function Signal(p: { s: SignalReading; now: boolean | undefined }) {
  const { s, now } = p
  return (
    <tr>
      <th scope="row">{s.signal}</th>
      <td><span class={`state ${s.verdict}`}>{s.verdict}</span>{!s.counts ? <div class="muted small">ignored by this policy</div> : s.detail && <div class="muted small">{s.detail}</div>}</td>
      <td>{s.last_event ? <>event <Time at={s.last_event} as={now ? 'ago' : 'clock'} /></> : s.value === null || !s.unit ? '–' : figure(s.value, s.unit)}</td>
      <td>{s.unit ? figure(s.threshold, s.unit) : '–'}</td>
      <td>{s.window_seconds ? span(s.window_seconds) : '–'}</td>
      <td>{s.age_seconds === null ? 'never' : s.age_seconds < 5 ? (now ? 'just now' : 'just then') : `${span(s.age_seconds)} ${now ? 'ago' : 'before'}`}</td>
    </tr>
  )
}
