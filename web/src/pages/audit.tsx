// The audit log, newest first, with live updates.

import { ComponentChildren } from 'preact'
import { useEffect, useRef, useState } from 'preact/hooks'
import { action, actions, kinds, status } from '../actions'
import { ask, Entry, List, Problem, problemOf, session } from '../api'
import type { PageProps } from '../router'
import { saveFile } from '../evidence'
import { onEvent } from '../live'
import { useResource } from '../resource'
import { go } from '../router'
import { workersOf } from '../rules'
import { exact, local } from '../time'
import { attempt, Button, Empty, Fault, Loading, Time, words } from '../parts/ui'

const many = 100

/** How many pages are read at once for a filter that selects little. */
const patience = 5

interface Filter { worker_id: string; action: string; by: string; kind: string; from: string; to: string }

/** The loaded entries, newest first, and the cursor of the next page. */
interface Known { items: Entry[]; next: string }

const same = (a: Entry, b: Entry) => a.id === b.id && a.at === b.at && a.action === b.action && a.worker_id === b.worker_id

/** Puts a newer reading of the log's end before what was read further back. */
function over(page: List<Entry>, old: Known): Known {
  const joins = old.items.length > 0 && page.items.some((e) => old.items.some((o) => same(o, e)))
  if (!joins) return { items: page.items, next: page.next ?? '' }
  return { items: [...page.items, ...old.items.filter((o) => !page.items.some((e) => same(o, e)))], next: old.next }
}

function takes(f: Filter, e: Entry): boolean {
  return (!f.worker_id || e.worker_id === f.worker_id) && (!f.action || e.action === f.action) && (!f.kind || e.by.kind === f.kind) &&
    (!f.by || e.by.name.toLowerCase().includes(f.by.toLowerCase())) && !f.to
}

function query(f: Filter): URLSearchParams {
  const out = new URLSearchParams()
  for (const [k, v] of Object.entries(f)) {
    const time = k === 'from' || k === 'to'
    if (v && (!time || !Number.isNaN(Date.parse(v)))) out.set(k, time ? new Date(v).toISOString() : v)
  }
  return out
}

export function Audit(p: PageProps) {
  const q = p.place.query
  const filter: Filter = { worker_id: q.get('worker_id') ?? '', action: q.get('action') ?? '', by: q.get('by') ?? '', kind: q.get('kind') ?? '', from: q.get('from') ?? '', to: q.get('to') ?? '' }
  const asked = query(filter).toString()
  return (
    <>
      <h1>Audit log</h1>
      <p class="headline">Every action of users, lull and the cloud, newest first.</p>
      <Filters key={asked} filter={filter} />
      <Entries key={'of ' + asked} filter={filter} asked={asked} />
    </>
  )
}

function Filters(p: { filter: Filter }) {
  const { filter } = p
  const [fault, setFault] = useState('')
  const all = useResource<List<{ id: string; name: string }>>('/workers?limit=1000')
  const one = useResource<{ id: string; name: string }>(filter.worker_id ? `/workers/${encodeURIComponent(filter.worker_id)}` : null)
  const set = async (e: Event) => {
    e.preventDefault()
    const f = new FormData(e.currentTarget as HTMLFormElement)
    const text = (name: string) => String(f.get(name) ?? '').trim()
    try {
      const worker = text('worker')
      const [id = ''] = worker === (one.value?.name ?? filter.worker_id) ? [filter.worker_id] : await workersOf(worker)
      const next = new URLSearchParams(Object.entries({ worker_id: id, action: text('action'), by: text('by'), kind: text('kind'), from: text('from'), to: text('to') }).filter(([, v]) => v))
      go('/audit' + (next.size > 0 ? '?' + next : ''))
    } catch (err) {
      setFault(err instanceof Problem && err.status === 404 ? 'Worker not found.' : err instanceof Error ? err.message : String(err))
    }
  }
  return (
    <form class="filters labelled" onSubmit={set} aria-label="Filter">
      <label>Worker <input key={one.value?.name} name="worker" list="audit-workers" autocomplete="off" defaultValue={one.value?.name ?? filter.worker_id} maxLength={128} size={14} placeholder="any" aria-invalid={fault ? true : undefined} /></label>
      <datalist id="audit-workers">{(all.value?.items ?? []).map((w) => <option key={w.id} value={w.name} />)}</datalist>
      <label>Action <select name="action" defaultValue={filter.action}><option value="">any</option>{filter.action && !actions.some(([code]) => code === filter.action) && <option value={filter.action}>{action(filter.action)}</option>}{actions.map(([code, name]) => <option key={code} value={code} selected={code === filter.action}>{name}</option>)}</select></label>
      <label>Actor <input name="by" defaultValue={filter.by} maxLength={128} size={14} placeholder="anyone" /></label>
      <label>Actor type <select name="kind">{[['', 'any'] as const, ...Object.entries(kinds)].map(([k, name]) => <option key={k} value={k} selected={k === filter.kind}>{name}</option>)}</select></label>
      <label>From <input name="from" type="datetime-local" defaultValue={filter.from} /></label>
      <label>To <input name="to" type="datetime-local" defaultValue={filter.to} /></label>
      <span class="sends"><button type="submit" class="primary">Filter</button>
        {Object.values(filter).some(Boolean) && <a class="button" href="/audit">Clear filters</a>}</span>
      {fault && <p class="bad" role="alert">{fault}</p>}
    </form>
  )
}

function Entries(p: { filter: Filter; asked: string }) {
  const { filter } = p
  const path = `/audit?${new URLSearchParams({ newest: 'true', limit: String(many) })}${p.asked && '&' + p.asked}`
  const list = useResource<List<Entry>>(path)
  const [fresh, setFresh] = useState<Entry[]>([])
  const [, redraw] = useState(0)
  const read = useRef<Known & { of?: List<Entry> }>({ items: [], next: '' })
  if (list.value && read.current.of !== list.value) read.current = { ...over(list.value, read.current), of: list.value }
  const known = read.current
  useEffect(() => onEvent((e) => {
    if (takes(filter, e)) setFresh((now) => (now.some((o) => same(o, e)) ? now : [e, ...now].slice(0, 1000)))
  }), [])
  const more = async () => {
    let { items, next } = known
    const before = items.length
    for (let n = 0; next && n < patience && items.length === before; n++) {
      const { value } = await ask<List<Entry>>('GET', `${path}&after=${encodeURIComponent(next)}`)
      items = [...items, ...value.items.filter((e) => !items.some((o) => same(o, e)))]
      next = value.next ?? ''
    }
    Object.assign(read.current, { items, next })
    redraw((n) => n + 1)
  }
  const save = () => attempt('Exported audit.csv.', async () => {
    const res = await fetch(`/api/v1/audit/export?format=csv${p.asked && '&' + p.asked}`, { headers: { Authorization: session.header } })
    if (!res.ok) throw await problemOf(res)
    saveFile('audit.csv', await res.blob())
  }).then(() => {})
  const all = [...fresh.filter((e) => !known.items.some((o) => same(o, e))), ...known.items].sort((a, b) => b.id - a.id)
  if (list.problem && !list.value) return <Fault problem={list.problem} retry={list.reload} />
  if (!list.value) return <Loading what="the audit log" />
  return (
    <>
      {list.problem && <Fault problem={list.problem} retry={list.reload} what="Cannot refresh. This may be out of date." />}
      {all.length === 0 ? (
        known.next ? <Empty title="No matches in the newest entries"><Button onClick={more}>Load older entries</Button></Empty>
          : p.asked ? <Empty title="No matching entries"><a href="/audit">Clear filters</a></Empty> : <Empty title="No entries yet" />
      ) : (
        <>
          <p class="aboutrows"><span role="status">{all.length.toLocaleString('en')} {all.length === 1 ? 'entry' : 'entries'}{known.next ? ', older ones not loaded' : ''}</span> <Button onClick={save}>Export CSV</Button></p>
          <div class="card flush scroll" tabIndex={0} role="region" aria-label="Audit entries">
            <table id="entries" class="asrows">
              <thead><tr><th scope="col">When</th><th scope="col">Action</th><th scope="col">Worker</th><th scope="col">By</th><th scope="col">Details</th></tr></thead>
              <tbody>{runsOf(all).map((run) => run.length === 1 ? <Row key={keyOf(run[0]!)} e={run[0]!} /> : <Repeats key={keyOf(run[run.length - 1]!)} run={run} />)}</tbody>
            </table>
          </div>
          {known.next && <div class="actions more"><Button onClick={() => attempt('', more).then(() => {})}>Load more</Button></div>}
        </>
      )}
    </>
  )
}

const keyOf = (e: Entry) => `${e.id}/${e.at}/${e.action}/${e.worker_id}`

/** How far apart repeats of an action may be. */
const repeatsWithin = 10 * 60_000

/**
 * Entries in runs: the same action by the same actor, close together. What users
 * do stays in its order; what programs do may have other entries between.
 */
function runsOf(all: Entry[]): Entry[][] {
  const out: Entry[][] = []
  const open = new Map<string, Entry[]>()
  for (const e of all) {
    const key = `${e.action}/${e.by.kind}/${e.by.name}`
    const run = e.by.kind === 'person' ? out[out.length - 1] : open.get(key), last = run?.[run.length - 1]
    if (run && last && last.action === e.action && last.by.name === e.by.name && last.by.kind === e.by.kind && new Date(last.at).getTime() - new Date(e.at).getTime() < repeatsWithin) {
      run.push(e)
      continue
    }
    out.push([e])
    open.set(key, out[out.length - 1]!)
  }
  return out
}

/** A run of repeats, folded into one row. */
function Repeats(p: { run: Entry[] }) {
  const [open, setOpen] = useState(false)
  const workers = new Set(p.run.map((e) => e.worker_id ?? ''))
  return <>{(open ? p.run : p.run.slice(0, 1)).map((e, i) => (
    <Row key={keyOf(e)} e={e} folded={open ? [] : p.run.slice(1)} many={i > 0 || workers.size === 1 || open ? undefined : workers.size}>
      {i === 0 && <button type="button" class="times" aria-expanded={open} aria-label={`${p.run.length} times`} onClick={() => setOpen(!open)}>{`× ${p.run.length}`}</button>}
    </Row>
  ))}</>
}

function Row(p: { e: Entry; folded?: Entry[]; many?: number; children?: ComponentChildren }) {
  const { e } = p
  const moved = e.from && e.to && e.from !== e.to ? `${status(e.from)} to ${status(e.to)}` : ''
  return (
    <tr data-entry={e.id} data-folded={p.folded?.map((f) => f.id).join(' ') || undefined}>
      <td class="nowrap"><Time at={e.at} /><div class="muted small">{exact(e.at)}</div></td>
      <td><strong>{action(e.action)}</strong> {p.children}</td>
      <td class="nowrap">{p.many ? `${p.many} workers` : e.worker_id ? <a href={`/workers/${encodeURIComponent(e.worker_id)}`}>{e.worker_name || e.worker_id}</a> : <span class="muted none">–</span>}</td>
      <td class="nowrap">{e.by.kind === 'person' ? e.by.name : <>{kinds[e.by.kind] ?? words(e.by.kind)}{e.by.kind !== 'controller' && <div class="muted small">{e.by.name}</div>}</>}</td>
      <td class="muted">{p.many ? '' : [moved, words(e.reason), local(e.detail ?? '', Date.now())].filter(Boolean).join('; ')}</td>
    </tr>
  )
}
