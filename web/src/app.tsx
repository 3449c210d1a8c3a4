// The frame around every page: navigation, connection status and the halt.

import { useEffect, useRef, useState } from 'preact/hooks'
import { ask, Halt, Session, session } from './api'
import { Boundary } from './parts/boundary'
import { cut, follow, link, onLink } from './live'
import { Login } from './pages/login'
import { useResource } from './resource'
import { Command, Palette, Shortcuts } from './parts/palette'
import { hostAt } from './parts/instanceactions'
import { go, usePlace } from './router'
import { onTheme, setTheme, theme, Theme } from './theme'
import { ago, useNow } from './time'
import { attempt, Button, Dialog, Fault, Loading, Time, Toasts, words } from './parts/ui'
import { Page, pages } from './pages'

export function App() {
  const [secret, setSecret] = useState(session.secret)
  useEffect(() => {
    const take = () => {
      if (!session.secret) cut()
      setSecret(session.secret)
    }
    session.onChange(take)
    take() // another tab may have signed out since the first render
  }, [])
  return secret ? <Frame key={secret} /> : <Login />
}

function Frame() {
  const place = usePlace()
  const who = useResource<Session>('/session', { every: 60_000 })
  const halt = useResource<Halt>('/halt', { on: (e) => e.action.includes('halt'), every: 10_000 })
  useEffect(() => { void follow() }, [])
  const name = place.path[0] ?? ''
  const local = who.value?.host // the dashboard of one host has its pages only
  const page = pages.find((p) => p.path === name && (!local || p.path === 'hosts'))
  useEffect(() => { if (local && !name) go(hostAt(local), true) }, [local, name])
  const [over, setOver] = useState<'palette' | 'shortcuts' | ''>('')
  const [open, setOpen] = useState(false) // the list of pages, on a phone
  const main = useRef<HTMLElement>(null)
  const first = useRef(true)
  const at = place.path.join('/')
  useEffect(() => {
    document.title = `${place.path[1] ?? page?.title ?? (page ? words(page.path).replace(/^./, (c) => c.toUpperCase()) : 'Not found')} · lull`
    if (!first.current) {
      main.current?.focus()
      setOpen(false)
    }
    first.current = false
  }, [at])
  useShortcuts(setOver)
  // A dialog tells that it closed only after the next key may have opened another.
  const shut = (what: typeof over) => setOver((now) => (now === what ? '' : now))
  const role = who.value?.role ?? 'viewer'
  const operator = role === 'operator' || role === 'admin'
  const shown = pages.filter((p) => p.title && (!p.admin || role === 'admin') && (!local || p.path === 'hosts'))
  return (
    <>
      <a class="skip" href="#main" onClick={(e) => { e.preventDefault(); main.current?.focus() }}>Skip to content</a>
      <Boundary what="the halt status"><HaltBanner halt={halt.value} operator={operator} reload={halt.reload} /></Boundary>
      {who.value?.shadow && <div class="banner shadow" role="status">This server is in dry-run mode: it decides and records, but takes no action.</div>}
      <div class="frame">
        <nav aria-label="Pages">
          <a class="brand" href="/" aria-label="lull: fleet"><svg viewBox="0 0 32 32" width="26" height="26" aria-hidden="true"><rect width="32" height="32" rx="9" fill="var(--accent)" /><path d="M21.5 19.5A8 8 0 0 1 12.5 8.6a8.2 8.2 0 1 0 10.9 10.5 8 8 0 0 1-1.9.4z" fill="var(--surface)" /></svg>lull</a>
          <button type="button" class="pages" aria-expanded={open} aria-controls="pages" onClick={() => setOpen(!open)}>{shown.find((p) => p.path === (page?.of ?? name))?.title ?? 'Pages'}</button>
          <LinkState />
          <div id="pages" class={open ? 'panel open' : 'panel'}>
          <ul>
            {shown.map((p) => (
              <li key={p.path}><a href={'/' + p.path} aria-current={p.path === (page?.of ?? name) ? 'page' : undefined}>{p.title}</a></li>
            ))}
          </ul>
          <div class="foot">
            <button type="button" class="plain" onClick={() => setOver('palette')}>Search <kbd>Ctrl K</kbd></button>
            <ThemeChoice />
            {who.value && <p class="who">{who.value.name} <span class="muted">({who.value.role})</span></p>}
            <button type="button" class="plain" onClick={() => session.end()}>Sign out</button>
            <p class="muted small version">{who.value && `${who.value.fleet}, lull ${who.value.version}`}</p>
          </div>
          </div>
        </nav>
        <main id="main" ref={main} tabIndex={-1}>
          <HaltControl local={local} halt={halt.value} operator={operator} reload={halt.reload} />
          {who.problem && !who.value ? <Fault problem={who.problem} retry={who.reload} what="Cannot reach the server." />
            : !who.value ? <Loading what="your session" />
            : page ? <Boundary key={name} what="this page"><page.show place={place} role={role} operator={operator} /></Boundary>
            : <><h1>Page not found</h1><p><a href="/">View the fleet</a></p></>}
        </main>
      </div>
      {over === 'palette' && <Palette workers={!local} commands={commands(shown, role, local, () => setOver('shortcuts'))} onClose={() => shut('palette')} />}
      {over === 'shortcuts' && <Shortcuts onClose={() => shut('shortcuts')} />}
      <Toasts />
    </>
  )
}

/** Keys that work on every page. */
function useShortcuts(open: (what: 'palette' | 'shortcuts') => void) {
  useEffect(() => {
    const keys = (e: KeyboardEvent) => {
      if (document.querySelector('dialog[open]')) return
      if ((e.ctrlKey || e.metaKey) && e.key.toLowerCase() === 'k') {
        e.preventDefault()
        open('palette')
        return
      }
      if (e.ctrlKey || e.metaKey || e.altKey || (e.target as Element).matches('input:not([type=checkbox]), textarea, select')) return
      if (e.key === '?') open('shortcuts')
      if (e.key !== '/') return
      e.preventDefault()
      const search = document.querySelector<HTMLElement>('main input[type=search]')
      if (search) search.focus()
      else open('palette')
    }
    document.addEventListener('keydown', keys)
    return () => document.removeEventListener('keydown', keys)
  }, [])
}

/** Returns the palette's commands. */
function commands(shown: Page[], role: string, local: string | undefined, shortcuts: () => void): Command[] {
  const out: Command[] = shown.map((p) => ({ label: p.title!, hint: 'page', run: () => go('/' + p.path) }))
  if (role === 'admin') out.push({ label: 'Import instances', hint: 'page', run: () => go('/import') })
  if (!local) out.push({ label: 'Preview a policy', hint: 'page', run: () => go('/preview') })
  out.push({ label: 'Keyboard shortcuts', hint: '?', run: shortcuts })
  for (const t of ['light', 'dark', 'system'] as Theme[]) out.push({ label: `Use the ${t} theme`, hint: 'theme', run: () => setTheme(t) })
  out.push({ label: 'Sign out', run: () => session.end() })
  return out
}

function HaltBanner(p: { halt: Halt | undefined; operator: boolean; reload: () => void }) {
  if (!p.halt?.on) return null
  const resume = () => attempt('Automatic actions resumed.', async () => { await ask('POST', '/halt', { on: false }); p.reload() }).then(() => {})
  return (
    <div class="banner halt" role="alert">
      <p><strong>Halted.</strong> All automatic actions are stopped{p.halt.by && <> by {p.halt.by}</>} (<Time at={p.halt.at} none="" />){p.halt.reason && <>: {p.halt.reason}</>}. {p.halt.until && <>Ends automatically <Time at={p.halt.until} none="" />.</>}</p>
      {p.operator && <Button onClick={resume}>Lift the halt</Button>}
    </div>
  )
}

function HaltControl(p: { local: string | undefined; halt: Halt | undefined; operator: boolean; reload: () => void }) {
  const [open, setOpen] = useState(false)
  const [reason, setReason] = useState('')
  const [hours, setHours] = useState('')
  if (!p.halt || p.halt.on || !p.operator) return null
  const stop = () => attempt('Halted. Automatic actions are stopped.', async () => {
    const until = hours ? new Date(Date.now() + Number(hours) * 3_600_000).toISOString() : undefined
    await ask('POST', '/halt', { on: true, reason: reason.trim() || undefined, until })
    p.reload()
    setOpen(false)
  }).then(() => {})
  return (
    <div class="haltbox">
      <button type="button" class="danger quiet" onClick={() => setOpen(true)}>Halt</button>
      {open && (
        <Dialog title="Stop all automatic actions?" onClose={() => setOpen(false)}>
          <p>{p.local ? `Within 5 seconds, lull host stops pausing, stopping and restarting instances of ${p.local} automatically, until the halt is lifted. Manual actions still work. A halt survives restarts.` : <>Within 5 seconds, lull stops pausing, resuming and draining workers automatically, on all servers, until the halt is lifted. Manual actions still work. A halt survives restarts.</>}</p>
          <div class="stack">
            <label for="halt-reason">Reason</label><input id="halt-reason" value={reason} maxLength={256} onInput={(e) => setReason(e.currentTarget.value)} />
            <label for="halt-hours">Ends</label>
            <select id="halt-hours" value={hours} onChange={(e) => setHours(e.currentTarget.value)}>
              <option value="">when someone lifts it</option>
              <option value="1">in 1 hour</option>
              <option value="4">in 4 hours</option>
              <option value="24">in 24 hours</option>
            </select>
          </div>
          <div class="actions">
            <button type="button" onClick={() => setOpen(false)}>Cancel</button>
            <Button kind="danger" onClick={stop}>Halt everything</Button>
          </div>
        </Dialog>
      )}
    </div>
  )
}

/** Shows whether the page receives live updates. */
function LinkState() {
  const [, redraw] = useState(0)
  useEffect(() => onLink(() => redraw((n) => n + 1)), [])
  const now = useNow()
  const text = link.state === 'live' ? 'Live' : link.state === 'connecting' ? 'Connecting…' : `Offline.${link.heard ? ` Last update ${ago(link.heard, now)}.` : ''} Reconnecting…`
  return <p class={`link ${link.state}`} role="status" title={link.why}><span class="dot" aria-hidden="true" />{text}</p>
}

function ThemeChoice() {
  const [t, set] = useState<Theme>(theme())
  useEffect(() => onTheme(() => set(theme())), [])
  return (
    <label class="theme">Theme{' '}
      <select value={t} onChange={(e) => { const v = e.currentTarget.value as Theme; setTheme(v) }}>
        <option value="system">system</option>
        <option value="light">light</option>
        <option value="dark">dark</option>
      </select>
    </label>
  )
}
