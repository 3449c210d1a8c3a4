import { useEffect, useLayoutEffect, useRef, useState } from 'preact/hooks'
import { Overview, Standing, WorkerRow } from '../api'
import type { PageProps } from '../router'
import { Boundary } from '../parts/boundary'
import { DiscoveryStatus } from '../parts/discovery'
import { hours, saved, Savings, unknownMoney, usd } from '../evidence'
import { useResource } from '../resource'
import { go } from '../router'
import { clock, local, minutes, span, useNow } from '../time'
import { Badge, Card, Empty, Fault, Loading, standings, Time } from '../parts/ui'

const order: Standing[] = ['active', 'idle', 'pausing_soon', 'blocked', 'unknown', 'paused', 'starting', 'failed']

/** How many rows are asked for at once, and in which steps. */
const step = 50
const ahead = 50
const rowHeight = 52

export function Fleet(p: PageProps) {
  const q = p.place.query
  const filter = { q: q.get('q') ?? '', standing: q.get('standing') ?? '', aws_region: q.get('aws_region') ?? '', sort: q.get('sort') ?? 'name' }
  const set = (change: Partial<typeof filter>, replace = false) => {
    const next = new URLSearchParams()
    for (const [k, v] of Object.entries({ ...filter, ...change })) if (v && !(k === 'sort' && v === 'name')) next.set(k, v)
    go('/' + (next.size > 0 ? '?' + next : ''), replace)
  }
  const [windowAt, setWindow] = useState({ offset: 0, limit: 2 * step })
  const key = new URLSearchParams(Object.entries(filter).filter(([, v]) => v))
  const filters = key.toString()
  key.set('offset', String(windowAt.offset))
  key.set('limit', String(windowAt.limit))
  const view = useResource<Overview>('/overview?' + key, { on: (e) => !!e.worker_id || e.action.includes('halt'), every: 10_000, revision: (v) => v.revision })
  const last = useRef<{ filters: string; value?: Overview; rows: Map<number, WorkerRow> }>({ filters: '', rows: new Map() })
  if (last.current.filters !== filters) last.current = { filters, value: last.current.value, rows: new Map() }
  const known = last.current
  if (view.value && view.value !== known.value) {
    known.value = view.value
    const v = view.value
    v.items.forEach((r, i) => {
      const old = known.rows.get(v.offset + i)
      if (!old || old.id !== r.id || old.revision <= r.revision) known.rows.set(v.offset + i, r)
    })
    for (const i of known.rows.keys()) if (i >= v.matched) known.rows.delete(i)
  }
  const o = known.value
  useEffect(() => { if (o) performance.mark('lull:fleet') }, [o === undefined])
  if (!o) return view.problem ? <><h1>Fleet</h1><Fault problem={view.problem} retry={view.reload} /></> : <><h1>Fleet</h1><Loading what="the fleet" /></>
  const c = (s: Standing) => o.counts[s] ?? 0
  return (
    <>
      <h1>Fleet</h1>
      {view.problem && <Fault problem={view.problem} retry={view.reload} what="This is not up to date." />}
      <p class="headline" role="status">{headline(o, !!(filter.q || filter.aws_region))}</p>
      {o.attention_total > 0 && <Boundary what="what needs attention"><Attention o={o} onAll={() => set({ sort: 'attention', standing: '', q: '' })} /></Boundary>}
      <div class="tiles" role="group" aria-label="Workers by standing">
        {order.filter((s) => c(s) > 0 || ['active', 'idle', 'pausing_soon', 'blocked', 'unknown'].includes(s) || filter.standing === s).map((s) => (
          <button key={s} type="button" class={`tile ${s}`} aria-pressed={filter.standing === s} title={standings[s].means} onClick={() => set({ standing: filter.standing === s ? '' : s })}>
            <span class="count">{c(s).toLocaleString('en')}</span>
            <Badge standing={s} />
          </button>
        ))}
      </div>
      {o.total > 0 && <Boundary what="the savings"><Saved /></Boundary>}
      <Boundary what="the search"><Search filter={filter} set={set} regions={o.aws_regions} /></Boundary>
      {o.total === 0 ? (
        <Boundary what="the last scan"><DiscoveryStatus /></Boundary>
      ) : o.matched === 0 ? (
        <Empty title="No worker matches."><button type="button" onClick={() => set({ q: '', standing: '', aws_region: '' })}>Show all {o.total.toLocaleString('en')}</button></Empty>
      ) : (
        <Boundary what="the list of workers"><Rows key={filters} rows={known.rows} total={o.matched} onWindow={(offset, limit) => { if (offset !== windowAt.offset || limit !== windowAt.limit) setWindow({ offset, limit }) }} /></Boundary>
      )}
    </>
  )
}

/** What was saved, in a line. */
function Saved() {
  const [from] = useState(() => new Date(Date.now() - 30 * 86_400_000).toISOString())
  const s = useResource<Savings>(`/savings?${new URLSearchParams({ idle: 'false', by: 'region', from })}`, { every: 600_000 }).value
  if (!s) return <p class="saved">&nbsp;</p>
  const t = s.total
  return (
    <p class="saved">
      {t.avoided_hours === 0 ? 'Nothing was saved yet.' : t.saved_usd === null ? <><strong>{hours(t.avoided_hours)}</strong> avoided in 30 days. {unknownMoney(t)}.</>
        : <><strong>{saved(t)}</strong> saved in 30 days, {usd(t.saved_usd / s.days)} a day.</>} <a href="/savings">Savings</a>
    </p>
  )
}

/** The fleet in one sentence, what matters first. */
function headline(o: Overview, narrowed: boolean): string {
  if (o.total === 0) return 'Nothing to watch yet.'
  const n = (s: Standing) => o.counts[s] ?? 0
  const count = (s: Standing) => n(s).toLocaleString('en')
  const parts = [`${count('active')} in use`]
  if (n('pausing_soon')) parts.push(`${count('pausing_soon')} about to pause`)
  if (n('paused')) parts.push(`${count('paused')} paused`)
  const needs = o.attention_total === 0 ? 'Nothing needs you.' : o.attention_total === 1 ? '1 worker needs you.' : `${o.attention_total.toLocaleString('en')} workers need you.`
  if (narrowed) return `${needs} ${order.reduce((sum, s) => sum + n(s), 0).toLocaleString('en')} of ${o.total.toLocaleString('en')} workers match.`
  return `${needs} ${o.total.toLocaleString('en')} workers: ${parts.join(', ')}.`
}

function Attention(p: { o: Overview; onAll: () => void }) {
  const few = p.o.attention.slice(0, 5)
  return (
    <Card title="Needs attention" class="attention" aside={p.o.attention_total > few.length ? <button type="button" class="plain" onClick={p.onAll}>See all {p.o.attention_total.toLocaleString('en')}</button> : undefined}>
      <ul>
        {few.map((r) => (
          <li key={r.id}>
            <Badge standing={r.standing} />
            <a href={`/workers/${encodeURIComponent(r.id)}`}>{r.name}</a>
            <span class="sentence">{local(r.sentence, Date.now())}</span>
          </li>
        ))}
      </ul>
    </Card>
  )
}

function Search(p: { filter: { q: string; aws_region: string; sort: string }; set: (c: Partial<{ q: string; aws_region: string; sort: string }>, replace?: boolean) => void; regions: string[] }) {
  const [text, setText] = useState(p.filter.q)
  const input = useRef<HTMLInputElement>(null)
  const timer = useRef(0)
  // A finished search does not overwrite what the user has typed since.
  useEffect(() => { if (document.activeElement !== input.current) setText(p.filter.q) }, [p.filter.q])
  useEffect(() => {
    const slash = (e: KeyboardEvent) => {
      if (e.key !== '/' || e.ctrlKey || e.metaKey || /^(INPUT|TEXTAREA|SELECT)$/.test((e.target as Element).tagName)) return
      e.preventDefault()
      input.current?.focus()
    }
    document.addEventListener('keydown', slash)
    return () => { document.removeEventListener('keydown', slash); clearTimeout(timer.current) }
  }, [])
  const type = (v: string) => {
    setText(v)
    clearTimeout(timer.current)
    timer.current = window.setTimeout(() => p.set({ q: v.trim() }, true), 200)
  }
  return (
    <form class="filters" role="search" onSubmit={(e) => { e.preventDefault(); p.set({ q: text.trim() }) }}>
      <label class="grow"><span class="hidden">Search workers</span>
        <input ref={input} type="search" placeholder="Search name, owner, tag, address…  ( / )" value={text} maxLength={256} onInput={(e) => type(e.currentTarget.value)} />
      </label>
      <label>Region{' '}
        <select value={p.filter.aws_region} onChange={(e) => p.set({ aws_region: e.currentTarget.value })}>
          <option value="">all</option>
          {p.regions.map((r) => <option key={r} value={r}>{r}</option>)}
        </select>
      </label>
      <label>Order{' '}
        <select value={p.filter.sort} onChange={(e) => p.set({ sort: e.currentTarget.value })}>
          <option value="name">by name</option>
          <option value="attention">urgent first</option>
          <option value="pause">next to pause first</option>
          <option value="idle">longest idle first</option>
        </select>
      </label>
    </form>
  )
}

/** A list of any length, of which only what can be seen is drawn. */
function Rows(p: { rows: Map<number, WorkerRow>; total: number; onWindow: (offset: number, limit: number) => void }) {
  const box = useRef<HTMLDivElement>(null)
  const [range, setRange] = useState({ from: 0, to: 30 })
  const frame = useRef(0)
  const look = () => {
    const el = box.current
    if (!el) return
    const from = Math.max(0, Math.floor(el.scrollTop / rowHeight) - 8)
    const to = Math.min(p.total, Math.ceil((el.scrollTop + el.clientHeight) / rowHeight) + 8)
    setRange((r) => (r.from === from && r.to === to ? r : { from, to }))
    const offset = Math.max(0, Math.floor((from - ahead) / step) * step)
    const end = Math.ceil((to + ahead) / step) * step
    p.onWindow(offset, Math.min(500, end - offset))
  }
  useLayoutEffect(look, [p.total])
  const onScroll = () => {
    cancelAnimationFrame(frame.current)
    frame.current = requestAnimationFrame(look)
  }
  const keys = (e: KeyboardEvent) => {
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[e.key]
    const at = (e.target as Element).closest('[data-index]')
    if (!move || !at) return
    e.preventDefault()
    const want = Math.max(0, Math.min(p.total - 1, Number(at.getAttribute('data-index')) + move))
    const el = box.current!
    const top = want * rowHeight
    if (top < el.scrollTop) el.scrollTop = top
    if (top + rowHeight > el.scrollTop + el.clientHeight) el.scrollTop = top + rowHeight - el.clientHeight
    look()
    requestAnimationFrame(() => (el.querySelector(`[data-index="${want}"] a`) as HTMLElement | null)?.focus())
  }
  const shown = []
  for (let i = range.from; i < Math.min(range.to, p.total); i++) shown.push(i)
  return (
    <div class="list" role="table" aria-label="Workers" aria-rowcount={p.total + 1}>
      <div role="rowgroup">
        <div class="row head" role="row" aria-rowindex={1}>
          <span role="columnheader">Worker</span><span role="columnheader">Standing</span><span role="columnheader">Last used</span><span role="columnheader">Pause</span><span role="columnheader">Why</span>
        </div>
      </div>
      <div class="body" role="rowgroup" ref={box} tabIndex={0} aria-label="Workers, scrolling" onScroll={onScroll} onKeyDown={keys}>
        <div class="space" role="presentation" style={{ height: `${p.total * rowHeight}px` }}>
          {shown.map((i) => <Row key={i} index={i} row={p.rows.get(i)} />)}
        </div>
      </div>
    </div>
  )
}

function Row(p: { index: number; row: WorkerRow | undefined }) {
  const r = p.row
  return (
    <div class="row" role="row" aria-rowindex={p.index + 2} data-index={p.index} style={{ transform: `translateY(${p.index * rowHeight}px)` }}>
      {r ? <>
        <span role="cell" class="name"><a href={`/workers/${encodeURIComponent(r.id)}`}>{r.name}</a><span class="muted small">{[r.aws_region, r.instance_type, r.owner].filter(Boolean).join(' · ')}</span></span>
        <span role="cell"><Badge standing={r.standing} /></span>
        <span role="cell"><Time at={r.last_activity_at} none="not seen" /></span>
        <span role="cell"><Countdown row={r} /></span>
        <span role="cell" class="why" title={local(r.sentence, Date.now())}>{local(r.sentence, Date.now())}</span>
      </> : <span role="cell" class="muted">…</span>}
    </div>
  )
}

function Countdown(p: { row: WorkerRow }) {
  const now = useNow()
  const r = p.row
  if (r.standing === 'paused') return r.last_paused_at ? <>since <Time at={r.last_paused_at} as="clock" /></> : <>–</>
  if (!r.target_pause_at) return r.timeout_minutes > 0 ? <span class="two">not now<span class="muted small">unused {minutes(r.idle_minutes)} of {minutes(r.timeout_minutes)}</span></span> : <span class="muted">–</span>
  const left = (new Date(r.target_pause_at).getTime() - now) / 1000
  return <span title={`at ${clock(r.target_pause_at, now)}`}>{left > 0 ? (r.block === 'budget' ? `not for ${span(left)}` : `in ${span(left)}`) : 'due'}</span>
}
