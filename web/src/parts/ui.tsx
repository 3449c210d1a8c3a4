// The parts that pages are made of.

import { ComponentChildren, JSX } from 'preact'
import { useEffect, useId, useLayoutEffect, useRef, useState } from 'preact/hooks'
import { Problem, Standing } from '../api'
import { Boundary } from './boundary'
import { ago, clock, exact, useNow } from '../time'

/** Labels, meanings and icons of standings. */
export const standings: Record<Standing, { label: string; means: string; mark: JSX.Element }> = {
  active: { label: 'Active', means: 'Running, active recently', mark: <circle cx="8" cy="8" r="5" /> },
  idle: { label: 'Idle', means: 'Running, not active recently', mark: <circle cx="8" cy="8" r="4" fill="none" stroke="currentColor" stroke-width="2" /> },
  pausing_soon: { label: 'Pausing soon', means: 'About to pause, or pausing', mark: <path d="M8 3a5 5 0 1 1 0 10zM8 3a5 5 0 0 0 0 10" fill="none" stroke="currentColor" stroke-width="2" /> },
  blocked: { label: 'Blocked', means: 'Idle, but something prevents a pause', mark: <rect x="3.5" y="3.5" width="9" height="9" rx="1.5" fill="none" stroke="currentColor" stroke-width="2" /> },
  unknown: { label: 'Unknown', means: 'Its activity cannot be read, so it is not paused', mark: <path d="M5.5 6a2.5 2.5 0 1 1 3.4 2.3c-.6.3-.9.7-.9 1.4M8 12.4v.4" fill="none" stroke="currentColor" stroke-width="2" stroke-linecap="round" /> },
  checking: { label: 'Checking', means: 'Just imported or started; its activity is being read', mark: <path d="M8 3a5 5 0 1 0 5 5" fill="none" stroke="currentColor" stroke-width="2" stroke-linecap="round" /> },
  paused: { label: 'Paused', means: 'Stopped; only storage is billed', mark: <path d="M5.5 4v8M10.5 4v8" stroke="currentColor" stroke-width="2.4" stroke-linecap="round" /> },
  starting: { label: 'Starting', means: 'Starting up', mark: <path d="M6 4l5 4-5 4z" /> },
  failed: { label: 'Failed', means: 'Cannot be started or read; needs action', mark: <path d="M8 3v6M8 12v.6" stroke="currentColor" stroke-width="2.4" stroke-linecap="round" /> },
  ended: { label: 'Ended', means: 'Terminated', mark: <path d="M4 8h8" stroke="currentColor" stroke-width="2" /> },
}

export function Badge(p: { standing: Standing }) {
  const s = standings[p.standing]
  return (
    <span class={`badge ${p.standing}`} title={s.means}>
      <svg viewBox="0 0 16 16" width="14" height="14" aria-hidden="true" fill="currentColor">{s.mark}</svg>
      {s.label}
    </span>
  )
}

/** A relative time or clock time, with the exact time as tooltip. */
export function Time(p: { at: string | null | undefined; none?: string; as?: 'ago' | 'clock' }) {
  const now = useNow()
  if (!p.at || p.at.startsWith('0001')) return <span class="muted">{p.none ?? 'never'}</span>
  return <time dateTime={p.at} title={exact(p.at)}>{p.as === 'clock' ? clock(p.at, now) : ago(p.at, now)}</time>
}

export function Card(p: { title: string; aside?: ComponentChildren; children: ComponentChildren; class?: string }) {
  const id = useId()
  return (
    <section class={`card ${p.class ?? ''}`} aria-labelledby={id}>
      <header><h2 id={id}>{p.title}</h2>{p.aside}</header>
      <Boundary what={p.title}>{p.children}</Boundary>
    </section>
  )
}

export function Empty(p: { title: string; children?: ComponentChildren }) {
  return <div class="empty"><p class="title">{p.title}</p>{p.children && <p>{p.children}</p>}</div>
}

/** An error, with a retry button if it can be retried. */
export function Fault(p: { problem: Problem; retry?: () => void; what?: string }) {
  return (
    <div class="fault" role="alert">
      <p><strong>{p.what ?? 'Cannot load this.'}</strong> {p.problem.message}</p>
      {p.problem.fields.length > 0 && <ul>{p.problem.fields.map((f) => <li key={f.location}>{f.message}{f.location && <span class="muted"> ({f.location})</span>}</li>)}</ul>}
      {p.retry && <button type="button" onClick={p.retry}>Retry</button>}
    </div>
  )
}

export function Loading(p: { what: string }) {
  return <p class="loading" role="status">{`Loading ${p.what}…`}</p>
}

export function Button(p: { onClick: () => void | Promise<void>; kind?: 'primary' | 'danger' | 'plain'; disabled?: boolean; why?: string; children: ComponentChildren; expanded?: boolean; label?: string }) {
  const [busy, setBusy] = useState(false)
  const go = async () => {
    if (busy || p.disabled) return
    setBusy(true)
    try { await p.onClick() } finally { setBusy(false) }
  }
  return (
    <button type="button" class={p.kind ?? ''} onClick={go} aria-disabled={p.disabled || busy} title={p.disabled ? p.why : undefined} aria-expanded={p.expanded} aria-label={p.label}>
      {p.children}
    </button>
  )
}

/** A modal dialog. Escape closes it, and the focus returns to where it was. */
export function Dialog(p: { title: string; onClose: () => void; children: ComponentChildren; wide?: boolean }) {
  const box = useRef<HTMLDialogElement>(null)
  const id = useId()
  useLayoutEffect(() => {
    const before = document.activeElement as HTMLElement | null
    if (!box.current?.open) box.current?.showModal()
    // Once the dialog is gone: while it is open, nothing behind it takes the focus.
    return () => queueMicrotask(() => before?.focus())
  }, [])
  return (
    <dialog ref={box} class={p.wide ? 'wide' : ''} aria-labelledby={id} onClose={p.onClose} onClick={(e) => { if (e.target === box.current) p.onClose() }}>
      <div class="inside">
        <h2 id={id}>{p.title}</h2>
        {p.children}
      </div>
    </dialog>
  )
}

type Toast = { text: string; bad: boolean; id: number }
let toasts: Toast[] = []
let redrawToasts: () => void = () => {}
let nextToast = 0

/** Shows a message for a few seconds. Errors stay until dismissed. */
export function say(text: string, bad = false) {
  const t = { text, bad, id: ++nextToast }
  toasts = [...toasts.slice(-3), t]
  redrawToasts()
  if (!bad) setTimeout(() => unsay(t.id), 6000)
}

function unsay(id: number) {
  toasts = toasts.filter((t) => t.id !== id)
  redrawToasts()
}

export function Toasts() {
  const [, set] = useState(0)
  useEffect(() => { redrawToasts = () => set((n) => n + 1) }, [])
  return (
    <div class="toasts" role="status" aria-live="polite">
      {toasts.map((t) => (
        <div key={t.id} class={t.bad ? 'toast bad' : 'toast'}>
          <span>{t.text}</span>
          <button type="button" class="plain" aria-label="Dismiss" onClick={() => unsay(t.id)}>×</button>
        </div>
      ))}
    </div>
  )
}

/** Runs a command and shows the outcome. An empty message shows only errors. */
export async function attempt(what: string, f: () => Promise<unknown>): Promise<boolean> {
  try {
    await f()
    if (what) say(what)
    return true
  } catch (e) {
    say(e instanceof Error ? e.message + (e instanceof Problem && e.fields.length > 0 ? ` (${e.fields.map((x) => x.message).join('; ')})` : '') : String(e), true)
    return false
  }
}

/** Returns the current width of an element in pixels; 0 before the first layout. */
export function useWidth(box: { current: HTMLElement | null }): number {
  const [width, setWidth] = useState(0)
  useLayoutEffect(() => {
    const el = box.current!
    const look = () => setWidth(el.clientWidth)
    look()
    const watch = new ResizeObserver(look)
    watch.observe(el)
    return () => watch.disconnect()
  }, [])
  return width
}

/** Turns a code into words: "idle timeout" for "idle_timeout". */
export function words(code: string | undefined): string {
  return (code ?? '').replaceAll('_', ' ').replaceAll('.', ' ').replaceAll('-', ' ')
}
