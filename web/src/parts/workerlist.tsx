// The list of workers, which renders only visible rows and scrolls with the page.

import { ComponentChildren } from 'preact'
import { useEffect, useLayoutEffect, useRef, useState } from 'preact/hooks'
import { WorkerRow } from '../api'
import { clock, local, minutes, span, useNow } from '../time'
import { Menu, MenuItems } from './menu'
import { Badge, Time, useWidth } from './ui'
import { workerAt } from './workerdialogs'

/** Rows are requested in steps, with some ahead of the visible range. */
const step = 50
const ahead = 50
const rowHeight = 52
const headHeight = 38

interface Column { key: string; label: string; sort?: string; width: number; flex?: number; end?: boolean; cell: (r: WorkerRow) => ComponentChildren }

const money = new Intl.NumberFormat('en', { style: 'currency', currency: 'USD', minimumFractionDigits: 2, maximumFractionDigits: 3 })

const none = <span class="muted">–</span>

/** Without the name, which every list has. The first are dropped last where there is no room. */
export const columns: Column[] = [
  { key: 'standing', label: 'State', sort: 'standing', width: 136, cell: (r) => <Badge standing={r.standing} /> },
  { key: 'pause', label: 'Next pause', sort: 'pause', width: 124, cell: (r) => <Countdown row={r} /> },
  { key: 'activity', label: 'Last used', sort: 'activity', width: 122, cell: (r) => <Time at={r.last_activity_at} none="never" /> },
  { key: 'why', label: 'Why', width: 190, flex: 1.7, cell: (r) => <span class="why" title={local(r.sentence, Date.now())}>{local(r.sentence, Date.now())}</span> },
  { key: 'owner', label: 'Owner', sort: 'owner', width: 100, flex: 0.6, cell: (r) => r.owner ? <span title={r.owner}>{r.owner.replace(/@.*/, '')}</span> : none },
  { key: 'cost', label: 'Cost/hour', sort: 'cost', width: 84, end: true, cell: (r) => r.usd_per_hour === null ? <span class="muted" title="No price known for this type">unknown</span> : <span class={r.standing === 'paused' ? 'muted' : ''}>{money.format(r.usd_per_hour)}</span> },
  { key: 'cpu', label: 'CPU', sort: 'cpu', width: 58, end: true, cell: (r) => r.cpu_utilization === null ? none : `${Math.round(r.cpu_utilization)} %` },
  { key: 'region', label: 'Region', sort: 'region', width: 96, cell: (r) => r.aws_region },
  { key: 'type', label: 'Type', sort: 'type', width: 100, cell: (r) => r.instance_type || none },
  { key: 'template', label: 'Template', sort: 'template', width: 110, cell: (r) => r.template_name || none },
]

export const usualColumns = ['standing', 'pause', 'activity', 'why', 'owner', 'cost', 'cpu']

export interface Sorting { key: string; reverse: boolean }

export interface ListProps {
  rows: Map<number, WorkerRow>
  total: number
  chosen: string[]
  sorting: Sorting
  selected: ReadonlyMap<string, WorkerRow>
  selectable: boolean
  onSort: (s: Sorting) => void
  onSelect: (rows: WorkerRow[], on: boolean) => void
  onSelectAll: (on: boolean) => void
  onWindow: (offset: number, limit: number) => void
  menu: (r: WorkerRow) => MenuItems
}

/** The chosen columns that a list of this width has room for, in their order. */
function fitting(width: number, chosen: string[], selectable: boolean): { shown: Column[]; select: boolean } {
  const select = selectable && width > 500
  let left = width - 32 - 44 - (select ? 46 : 0) - (width > 600 ? 170 : 120)
  const shown = columns.filter((c) => chosen.includes(c.key) && (left -= c.width + 12) >= 0)
  return { shown, select }
}

export function WorkerList(p: ListProps) {
  const box = useRef<HTMLDivElement>(null), body = useRef<HTMLDivElement>(null)
  const width = useWidth(box)
  const { shown, select } = fitting(width, p.chosen, p.selectable)
  const [range, setRange] = useState({ from: 0, to: 30 })
  const frame = useRef(0), wanted = useRef<number | null>(null), lastPicked = useRef<number | null>(null)
  const look = () => {
    const el = body.current
    if (!el) return
    const top = el.getBoundingClientRect().top
    const from = Math.max(0, Math.floor(-top / rowHeight) - 8)
    const to = Math.min(p.total, Math.max(1, Math.ceil((innerHeight - top) / rowHeight)) + 8)
    setRange((r) => (r.from === from && r.to === to ? r : { from, to }))
    const offset = Math.max(0, Math.floor((from - ahead) / step) * step)
    p.onWindow(offset, Math.min(500, Math.ceil((to + ahead) / step) * step - offset))
  }
  const latest = useRef(look)
  latest.current = look
  useEffect(() => {
    const moved = () => {
      cancelAnimationFrame(frame.current)
      frame.current = requestAnimationFrame(() => latest.current())
    }
    addEventListener('scroll', moved, { passive: true })
    addEventListener('resize', moved)
    return () => { removeEventListener('scroll', moved); removeEventListener('resize', moved); cancelAnimationFrame(frame.current) }
  }, [])
  useLayoutEffect(() => {
    look()
    if (wanted.current === null) return
    const link = body.current?.querySelector<HTMLElement>(`[data-index="${wanted.current}"] .name a`)
    if (!link) return
    link.focus({ preventScroll: true })
    wanted.current = null
  })
  /** Brings a row into sight, and gives it the keyboard once it is drawn. */
  const goTo = (n: number) => {
    const want = Math.max(0, Math.min(p.total - 1, n))
    const top = body.current!.getBoundingClientRect().top + scrollY + want * rowHeight
    if (top < scrollY + headHeight + 60) scrollTo(0, Math.max(0, top - headHeight - 60))
    if (top + rowHeight > scrollY + innerHeight - 72) scrollTo(0, top + rowHeight - innerHeight + 72)
    wanted.current = want
    look()
    const link = body.current?.querySelector<HTMLElement>(`[data-index="${want}"] .name a`)
    if (link) { link.focus({ preventScroll: true }); wanted.current = null }
  }
  const pick = (index: number, on: boolean, shift: boolean) => {
    const from = shift && lastPicked.current !== null ? lastPicked.current : index
    const rows = []
    for (let i = Math.min(from, index); i <= Math.max(from, index); i++) if (p.rows.has(i)) rows.push(p.rows.get(i)!)
    lastPicked.current = index
    p.onSelect(rows, on)
  }
  useEffect(() => {
    const keys = (e: KeyboardEvent) => {
      const target = e.target as Element
      if (e.ctrlKey || e.metaKey || e.altKey || document.querySelector('dialog[open], [popover]:popover-open')) return
      const search = target.matches('input[type=search]')
      if (!search && target.matches('input:not([type=checkbox]), textarea, select')) return
      const row = target.closest('[data-index]')
      const at = row ? Number(row.getAttribute('data-index')) : -1
      const to = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + 10, PageUp: at - 10, Home: 0, End: p.total - 1 }[e.key]
      const enters = e.key === 'ArrowDown' && (search || target === document.body || target.id === 'main')
      if (to !== undefined && (row || enters)) {
        e.preventDefault()
        if (!row) goTo(Math.max(0, Math.ceil(-body.current!.getBoundingClientRect().top / rowHeight)))
        else if (to >= 0 || e.key !== 'ArrowUp') goTo(to)
      } else if (row && p.selectable && (e.key === 'x' || e.key === ' ' && !target.matches('button, input'))) {
        e.preventDefault()
        const r = p.rows.get(at)
        if (r) pick(at, !p.selected.has(r.id), e.shiftKey)
      }
    }
    document.addEventListener('keydown', keys)
    return () => document.removeEventListener('keydown', keys)
  })
  const template = [...(select ? ['22px'] : []), `minmax(${width > 600 ? 170 : 110}px, 1.5fr)`, ...shown.map((c) => (c.flex ? `minmax(${c.width}px, ${c.flex}fr)` : `${c.width}px`)), '32px'].join(' ')
  const drawn = []
  for (let i = range.from; i < Math.min(range.to, p.total); i++) drawn.push(i)
  const sort = (key: string | undefined, label: string, end?: boolean) => {
    const on = key !== undefined && p.sorting.key === key
    return (
      <span role="columnheader" class={end ? 'end' : ''} aria-sort={on ? (p.sorting.reverse ? 'descending' : 'ascending') : undefined}>
        {key ? <button type="button" class="sort" onClick={() => p.onSort({ key, reverse: on && !p.sorting.reverse })}>{label}<span class="arrow" aria-hidden="true">{on ? (p.sorting.reverse ? '▼' : '▲') : ''}</span></button> : label}
      </span>
    )
  }
  const every = p.selected.size > 0 && p.selected.size >= Math.min(p.total, 500)
  return (
    <div class="list" role="table" aria-label="Workers" aria-rowcount={p.total + 1} ref={box} style={{ '--columns': template }}>
      <div role="rowgroup" class="headgroup">
        <div class="row head" role="row" aria-rowindex={1}>
          {select && <span role="columnheader"><input type="checkbox" aria-label="Select all workers" checked={every} onChange={() => p.onSelectAll(!every)} /></span>}
          {sort('name', 'Worker')}
          {shown.map((c) => sort(c.sort, c.label, c.end))}
          <span role="columnheader"><span class="hidden">Actions</span></span>
        </div>
      </div>
      <div class="body" role="rowgroup" ref={body} style={{ height: `${p.total * rowHeight}px` }}>
        {drawn.map((i) => {
          const r = p.rows.get(i)
          return (
            <div key={i} class={`row ${r && p.selected.has(r.id) ? 'selected' : ''}`} role="row" aria-rowindex={i + 2} aria-selected={r && select ? p.selected.has(r.id) : undefined} data-index={i} style={{ transform: `translateY(${i * rowHeight}px)` }}>
              {r ? <>
                {select && <span role="cell"><input type="checkbox" aria-label={`Select ${r.name}`} checked={p.selected.has(r.id)} onClick={(e) => pick(i, e.currentTarget.checked, e.shiftKey)} /></span>}
                <span role="cell" class="name"><a href={workerAt(r.id)}>{r.name}</a><span class="muted small">{under(r, shown)}</span></span>
                {shown.map((c) => <span key={c.key} role="cell" class={c.end ? 'end' : ''}>{c.cell(r)}</span>)}
                <span role="cell"><Menu label={`Actions for ${r.name}`} kind="dots" items={p.menu(r)}>⋯</Menu></span>
              </> : <span role="cell" class="muted">…</span>}
            </div>
          )
        })}
      </div>
    </div>
  )
}

/** Returns what the columns do not show, for the line below the name. */
function under(r: WorkerRow, shown: Column[]): string {
  const has = (key: string) => shown.some((c) => c.key === key)
  return [!r.armed && 'dry run', !has('region') && r.aws_region, !has('type') && r.instance_type, !has('owner') && r.owner].filter(Boolean).join(' · ')
}

function Countdown(p: { row: WorkerRow }) {
  const now = useNow()
  const r = p.row
  if (r.standing === 'paused') return r.last_paused_at ? <span class="two">paused<span class="muted small">since <Time at={r.last_paused_at} as="clock" /></span></span> : none
  if (r.standing === 'checking') return none
  if (!r.target_pause_at) return r.timeout_minutes > 0 ? <span class="two">{r.standing === 'active' ? 'in use' : r.standing === 'unknown' ? 'unknown' : 'blocked'}<span class="muted small">idle {minutes(r.idle_minutes)} of {minutes(r.timeout_minutes)}</span></span> : none
  const left = (new Date(r.target_pause_at).getTime() - now) / 1000
  return <span title={`at ${clock(r.target_pause_at, now)}`}>{left > 0 ? (r.block === 'budget' ? `earliest in ${span(left)}` : `in ${span(left)}`) : 'due'}</span>
}
