// The fleet: what needs attention, counts by state, and the list of workers.

import { useEffect, useRef, useState } from 'preact/hooks'
import { ask, Overview, Standing, WorkerRow } from '../api'
import type { PageProps } from '../router'
import { Boundary } from '../parts/boundary'
import { BulkBar } from '../parts/bulk'
import { Discovery } from '../parts/discovery'
import { hours, saved, Savings, unknownMoney, usd } from '../evidence'
import { CreateWorker, ScaleUp } from '../parts/launch'
import { Menu, MenuItems } from '../parts/menu'
import { useResource } from '../resource'
import { go } from '../router'
import { local } from '../time'
import { attempt, Badge, Button, Card, Dialog, Empty, Fault, Loading, standings } from '../parts/ui'
import { SaveView, savedViews, forgetView } from '../parts/views'
import { rowMenu } from '../parts/workeractions'
import { DialogKind, WorkerDialog } from '../parts/workerdialogs'
import { columns, usualColumns, WorkerList } from '../parts/workerlist'

const order: Standing[] = ['active', 'idle', 'pausing_soon', 'blocked', 'unknown', 'checking', 'paused', 'starting', 'failed']

/** Returns rows as the list shows them now, where it shows them. */
function current(rows: WorkerRow[], shown: ReadonlyMap<number, WorkerRow>): WorkerRow[] {
  const now = new Map([...shown.values()].map((r) => [r.id, r]))
  return rows.map((r) => now.get(r.id) ?? r)
}

/** The most workers that can be selected at once. */
const mostSelected = 500

interface Filter { q: string; standing: string; aws_region: string; sort: string; reverse: string }

const unfiltered: Filter = { q: '', standing: '', aws_region: '', sort: 'name', reverse: '' }

function filterOf(q: URLSearchParams): Filter {
  return { q: q.get('q') ?? '', standing: q.get('standing') ?? '', aws_region: q.get('aws_region') ?? '', sort: q.get('sort') ?? 'name', reverse: q.get('reverse') ?? '' }
}

function pathOf(f: Filter): string {
  const next = new URLSearchParams(Object.entries(f).filter(([k, v]) => v && !(k === 'sort' && v === 'name')))
  return '/' + (next.size > 0 ? '?' + next : '')
}

export function Fleet(p: PageProps) {
  const filter = filterOf(p.place.query)
  const set = (change: Partial<Filter>, replace = false) => go(pathOf({ ...filter, ...change }), replace)
  const [windowAt, setWindow] = useState({ offset: 0, limit: 100 })
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
  const [selected, setSelected] = useState<ReadonlyMap<string, WorkerRow>>(new Map())
  const [chosen, setChosen] = useColumns()
  const [dialog, setDialog] = useState<{ kind: DialogKind; id: string } | null>(null)
  const [adding, setAdding] = useState<'create' | 'scale' | 'arm' | 'view' | ''>('')
  const admin = p.role === 'admin'
  const o = known.value
  useEffect(() => { if (o) performance.mark('lull:fleet') }, [o === undefined])
  if (!o) return view.problem ? <><h1>Fleet</h1><Fault problem={view.problem} retry={view.reload} /></> : <><h1>Fleet</h1><Loading what="the fleet" /></>
  const c = (s: Standing) => o.counts[s] ?? 0
  const select = (rows: WorkerRow[], on: boolean) => setSelected((was) => {
    const next = new Map(was)
    for (const r of rows) if (on) next.set(r.id, r); else next.delete(r.id)
    return next
  })
  const selectAll = async (on: boolean) => {
    if (!on) return setSelected(new Map())
    const all = new URLSearchParams(key)
    all.set('offset', '0')
    all.set('limit', String(mostSelected))
    await attempt('', async () => select((await ask<Overview>('GET', '/overview?' + all)).value.items, true))
  }
  const add: MenuItems = [
    { label: 'Create from a template…', run: () => setAdding('create') },
    { label: 'Scale up…', run: () => setAdding('scale') },
    { label: 'Import instances', href: '/import' },
    null,
    { label: 'Templates', href: '/templates' },
  ]
  return (
    <>
      <h1>Fleet</h1>
      {view.problem && <Fault problem={view.problem} retry={view.reload} what="Cannot refresh. This may be out of date." />}
      {o.total > 0 && <p class="headline" role="status">{headline(o, !!(filter.q || filter.aws_region))}</p>}
      {o.unarmed_total > 0 && <p class="note"><span>{o.unarmed_total === 1 ? '1 worker is' : `${o.unarmed_total.toLocaleString('en')} workers are`} in dry-run mode: lull records its decisions but pauses nothing.</span>{admin && <Button onClick={() => setAdding('arm')}>Arm all</Button>}</p>}
      {o.attention_total > 0 && <Boundary what="what needs attention"><Attention o={o} onAll={() => set({ ...unfiltered, sort: 'attention' })} /></Boundary>}
      {o.total > 0 && <div class="tiles" role="group" aria-label="Workers by state">
        {order.filter((s) => c(s) > 0 || ['active', 'idle', 'pausing_soon', 'blocked', 'paused'].includes(s) || filter.standing === s).map((s) => (
          <button key={s} type="button" class={`tile ${s}`} aria-pressed={filter.standing === s} title={standings[s].means} onClick={() => set({ standing: filter.standing === s ? '' : s })}>
            <span class="count">{c(s).toLocaleString('en')}</span>
            <Badge standing={s} />
          </button>
        ))}
      </div>}
      {o.total > 0 && <Boundary what="the savings"><Saved /></Boundary>}
      {o.total > 0 && <Boundary what="the search">
        <Search filter={filter} set={set} regions={o.aws_regions}>
          <Menu label="Views" items={views(filter, set, () => setAdding('view'))}>Views</Menu>
          <span class="wideonly"><Menu label="Columns" stays items={columns.map((x) => ({ label: x.label, checked: chosen.includes(x.key), run: () => setChosen(chosen.includes(x.key) ? chosen.filter((k) => k !== x.key) : [...chosen, x.key]) }))}>Columns</Menu></span>
          {admin && <Menu label="Add workers" kind="primary" items={add}>Add</Menu>}
        </Search>
      </Boundary>}
      {o.total === 0 ? (
        <Boundary what="the last scan"><Discovery admin={admin} first onImported={view.reload} /></Boundary>
      ) : o.matched === 0 ? (
        <Empty title="No matching workers"><button type="button" onClick={() => set(unfiltered)}>Clear filters</button></Empty>
      ) : (
        <Boundary what="the list of workers">
          <WorkerList key={filters} rows={known.rows} total={o.matched} chosen={chosen} sorting={{ key: filter.sort, reverse: filter.reverse === 'true' }} selected={selected} selectable={p.operator}
            onSort={(s) => set({ sort: s.key, reverse: s.reverse ? 'true' : '' }, true)} onSelect={select} onSelectAll={(on) => void selectAll(on)}
            onWindow={(offset, limit) => { if (offset !== windowAt.offset || limit !== windowAt.limit) setWindow({ offset, limit }) }}
            menu={(r) => rowMenu(r, { operator: p.operator, admin, open: (kind) => setDialog({ kind, id: r.id }), reload: view.reload })} />
        </Boundary>
      )}
      {selected.size > 0 && <BulkBar rows={current([...selected.values()], known.rows)} admin={admin} onClear={() => setSelected(new Map())} onDone={() => { setSelected(new Map()); view.reload() }} />}
      {dialog && <WorkerDialog kind={dialog.kind} id={dialog.id} admin={admin} onClose={() => { setDialog(null); view.reload() }} />}
      {adding === 'create' && <CreateWorker onClose={() => setAdding('')} />}
      {adding === 'scale' && <ScaleUp onClose={() => setAdding('')} />}
      {adding === 'view' && <SaveView path={pathOf(filter)} onClose={() => setAdding('')} />}
      {adding === 'arm' && (
        <Dialog title="Arm all workers?" onClose={() => setAdding('')}>
          <p>lull may then pause them. Workers that are already idle are warned first.</p>
          <div class="actions">
            <button type="button" onClick={() => setAdding('')}>Cancel</button>
            <Button kind="primary" onClick={async () => { if (await attempt('All workers are armed.', () => ask('POST', '/workers/arm', { all: true }))) setAdding(''); view.reload() }}>Arm all</Button>
          </div>
        </Dialog>
      )}
    </>
  )
}

const columnsKey = 'lull-columns'

/** The columns that this browser shows. */
function useColumns(): [string[], (next: string[]) => void] {
  const [chosen, set] = useState<string[]>(() => localStorage.getItem(columnsKey)?.split(',') ?? usualColumns)
  return [chosen, (next) => { localStorage.setItem(columnsKey, next.join(',')); set(next) }]
}

function views(f: Filter, set: (c: Partial<Filter>) => void, save: () => void): MenuItems {
  const sorted = (label: string, sort: string) => ({ label, run: () => set({ sort, reverse: '' }) })
  const own = savedViews()
  return [
    sorted('Urgent first', 'attention'), sorted('Next to pause first', 'pause'), sorted('Longest idle first', 'idle'), sorted('Most expensive first', 'cost'), sorted('By name', 'name'),
    ...(own.length > 0 ? [null, ...own.map((v) => ({ label: v.name, href: v.path }))] : []),
    null, { label: 'Save this view…', run: save },
    ...own.filter((v) => v.path === pathOf(f)).map((v) => ({ label: `Delete view ${v.name}`, run: () => forgetView(v.name) })),
  ]
}

/** Savings in one line. */
function Saved() {
  const [from] = useState(() => new Date(Date.now() - 30 * 86_400_000).toISOString())
  const s = useResource<Savings>(`/savings?${new URLSearchParams({ idle: 'false', by: 'region', from })}`, { every: 600_000 }).value
  if (!s) return <p class="saved">&nbsp;</p>
  const t = s.total
  return (
    <p class="saved">
      {t.avoided_hours === 0 ? 'Nothing saved yet.' : t.saved_usd === null ? <><strong>{hours(t.avoided_hours)}</strong> avoided in 30 days. {unknownMoney(t)}.</>
        : s.days < 1 ? <><strong>{saved(t)}</strong> saved so far. Not enough data yet for a rate.</>
        : <><strong>{saved(t)}</strong> saved in {s.days < 30 ? `${Math.floor(s.days)} ${s.days < 2 ? 'day' : 'days'}` : '30 days'}, {usd(t.saved_usd / s.days)} a day.</>} <a href="/savings">Savings</a>
    </p>
  )
}

/** Summarizes the fleet in one sentence, most important first. */
function headline(o: Overview, narrowed: boolean): string {
  const n = (s: Standing) => o.counts[s] ?? 0
  const count = (s: Standing) => n(s).toLocaleString('en')
  const parts = [`${count('active')} in use`]
  if (n('pausing_soon')) parts.push(`${count('pausing_soon')} about to pause`)
  if (n('paused')) parts.push(`${count('paused')} paused`)
  if (n('checking')) parts.push(`${count('checking')} being checked`)
  const needs = o.attention_total === 0 ? 'Nothing needs attention.' : o.attention_total === 1 ? '1 worker needs attention.' : `${o.attention_total.toLocaleString('en')} workers need attention.`
  if (narrowed) return `${needs} ${order.reduce((sum, s) => sum + n(s), 0).toLocaleString('en')} of ${o.total.toLocaleString('en')} workers match.`
  return `${needs} ${o.total.toLocaleString('en')} worker${o.total === 1 ? '' : 's'}: ${parts.join(', ')}.`
}

function Attention(p: { o: Overview; onAll: () => void }) {
  const few = p.o.attention.slice(0, 5)
  return (
    <Card title="Needs attention" class="attention" aside={p.o.attention_total > few.length ? <button type="button" class="plain" onClick={p.onAll}>View all {p.o.attention_total.toLocaleString('en')}</button> : undefined}>
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

function Search(p: { filter: Filter; set: (c: Partial<Filter>, replace?: boolean) => void; regions: string[]; children: import('preact').ComponentChildren }) {
  const [text, setText] = useState(p.filter.q)
  const input = useRef<HTMLInputElement>(null)
  const timer = useRef(0)
  // A finished search does not overwrite what the user has typed since.
  useEffect(() => { if (document.activeElement !== input.current) setText(p.filter.q) }, [p.filter.q])
  useEffect(() => () => clearTimeout(timer.current), [])
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
      {p.regions.length > 1 && <label>Region{' '}
        <select value={p.filter.aws_region} onChange={(e) => p.set({ aws_region: e.currentTarget.value })}>
          <option value="">all</option>
          {p.regions.map((r) => <option key={r} value={r}>{r}</option>)}
        </select>
      </label>}
      {p.children}
    </form>
  )
}
