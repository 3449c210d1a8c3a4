// The event stream, open while the page is visible.

import { Entry, problemOf, session } from './api'

export type Link = { state: 'connecting' | 'live' | 'offline'; heard: number; why?: string }

type Listener = (e: Entry) => void

const events = new Set<Listener>()
const resets = new Set<() => void>()
const watchers = new Set<() => void>()

export let link: Link = { state: 'connecting', heard: 0 }
let last = '' // the id to resume after
let stop: AbortController | null = null
let running = false

function tell(next: Link) {
  const news = next.state !== link.state || next.why !== link.why
  link = next
  if (news) for (const f of watchers) f()
}

/** Silence longer than this is a broken connection: the server speaks every 15 s. */
const silence = 40_000
/** A hidden page closes its connection after this long; a browser has few. */
const hiddenFor = 60_000

export function onEvent(f: Listener): () => void {
  events.add(f)
  return () => events.delete(f)
}

/** Calls f when events may have been missed and everything is to be read again. */
export function onReset(f: () => void): () => void {
  resets.add(f)
  return () => resets.delete(f)
}

export function onLink(f: () => void): () => void {
  watchers.add(f)
  return () => watchers.delete(f)
}

const wait = (ms: number) => new Promise((r) => setTimeout(r, ms))

/** Follows the stream until the session ends. Calling it twice is harmless. */
export async function follow() {
  if (running) return
  running = true
  for (let tries = 0; session.secret; tries++) {
    if (document.hidden && tries > 0) {
      await visible()
      tries = 0
    }
    try {
      await once(() => { tries = 0 })
      tell({ ...link, state: 'connecting', why: 'The server closed the event stream.' })
    } catch (e) {
      if (!session.secret) break
      tell({ ...link, state: 'offline', why: e instanceof Error ? e.message : String(e) })
    }
    await wait(Math.min(10_000, 250 * 2 ** Math.min(tries, 6)) * (0.75 + Math.random() / 2))
  }
  running = false
  last = ''
}

function visible(): Promise<void> {
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden) return
      document.removeEventListener('visibilitychange', look)
      resolve()
    }
    document.addEventListener('visibilitychange', look)
    look()
  })
}

/** Ends the stream, if it runs: follow then starts another or ends. */
export function cut() { stop?.abort() }

let hiding = 0
document.addEventListener('visibilitychange', () => {
  clearTimeout(hiding)
  if (document.hidden) hiding = window.setTimeout(cut, hiddenFor)
})
window.addEventListener('online', cut)
// A browser keeps pages that were left, with their connections, of which it has six.
window.addEventListener('pagehide', cut)

async function once(connected: () => void) {
  const control = new AbortController()
  stop = control
  let guard = 0
  const heard = () => {
    clearTimeout(guard)
    guard = window.setTimeout(() => control.abort(), silence)
    tell({ state: 'live', heard: Date.now() })
  }
  guard = window.setTimeout(() => control.abort(), silence)
  try {
    const headers: Record<string, string> = { Authorization: session.header, Accept: 'text/event-stream' }
    if (last) headers['Last-Event-ID'] = last
    const res = await fetch('/api/v1/events', { headers, signal: control.signal, cache: 'no-store' })
    if (!res.ok || !res.body) throw await problemOf(res)
    connected()
    const gap = last === ''
    heard()
    if (gap) for (const f of resets) f() // what happened before the first message is not in the stream
    await read(res.body, heard)
  } finally {
    clearTimeout(guard)
    control.abort()
  }
}

/** Reads server-sent events. An id counts once its message is complete. */
async function read(body: ReadableStream<Uint8Array>, heard: () => void) {
  const reader = body.pipeThrough(new TextDecoderStream() as unknown as ReadableWritablePair<string, Uint8Array>).getReader()
  let rest = ''
  for (;;) {
    const { value, done } = await reader.read()
    if (done) return
    heard()
    const parts = (rest + value).split('\n\n')
    rest = parts.pop() ?? ''
    for (const part of parts) message(part)
  }
}

function message(text: string) {
  let id = '', event = '', data = ''
  for (const line of text.split('\n')) {
    if (line.startsWith('id:')) id = line.slice(3).trim()
    else if (line.startsWith('event:')) event = line.slice(6).trim()
    else if (line.startsWith('data:')) data += line.slice(5).trim()
  }
  if (event === 'reset') for (const f of resets) f()
  if (event === 'event') {
    const entry = JSON.parse(data) as Entry
    for (const f of events) f(entry)
  }
  if (id) last = id
}
