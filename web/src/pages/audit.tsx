// What was done, by whom and why: the newest first, and what happens now.

import { useEffect, useRef, useState } from 'preact/hooks'
import { Entry, List } from '../api'
import type { PageProps } from '../app'
import { onEvent } from '../live'
import { useResource } from '../resource'
import { go } from '../router'
import { Empty, Fault, Loading, Time, words } from '../ui'

const many = 100

export function Audit(p: PageProps) {
  const q = p.place.query
  const filter = { worker_id: q.get('worker_id') ?? '', action: q.get('action') ?? '', from: q.get('from') ?? '', to: q.get('to') ?? '' }
  const set = (change: Partial<typeof filter>) => {
    const next = new URLSearchParams(Object.entries({ ...filter, ...change }).filter(([, v]) => v))
    go('/audit' + (next.size > 0 ? '?' + next : ''))
  }
  const ask = new URLSearchParams({ newest: 'true', limit: String(many) })
  for (const [k, v] of Object.entries(filter)) {
    const time = k === 'from' || k === 'to'
    if (v && (!time || !Number.isNaN(Date.parse(v)))) ask.set(k, time ? new Date(v).toISOString() : v)
  }
  const list = useResource<List<Entry>>('/audit?' + ask)
  const [fresh, setFresh] = useState<Entry[]>([])
  const base = useRef(list.value)
  if (base.current !== list.value) {
    base.current = list.value
    if (fresh.length > 0) setFresh(fresh.filter((e) => !list.value?.items.some((o) => same(o, e))))
  }
  useEffect(() => {
    setFresh([])
    return onEvent((e) => {
      if (filter.worker_id && e.worker_id !== filter.worker_id || filter.action && e.action !== filter.action || filter.to) return
      setFresh((now) => (now.some((o) => same(o, e)) ? now : [e, ...now].slice(0, 1000)))
    })
  }, [filter.worker_id, filter.action, filter.to])
  const known = list.value?.items ?? []
  const all = [...fresh.filter((e) => !known.some((o) => same(o, e))), ...known]
  return (
    <>
      <h1>Audit log</h1>
      <p class="headline">Every action, with who asked for it and why. The newest {many}; new ones appear as they happen.</p>
      <form class="filters" onSubmit={(e) => { e.preventDefault(); const f = new FormData(e.currentTarget); set({ worker_id: String(f.get('worker_id') ?? '').trim(), action: String(f.get('action') ?? '').trim().replaceAll(' ', '_'), from: String(f.get('from') ?? ''), to: String(f.get('to') ?? '') }) }}>
        <label>Worker id <input name="worker_id" value={filter.worker_id} maxLength={128} size={18} /></label>
        <label>Action <input name="action" value={filter.action} maxLength={128} size={16} placeholder="any" /></label>
        <label>From <input name="from" type="datetime-local" value={filter.from} /></label>
        <label>Before <input name="to" type="datetime-local" value={filter.to} /></label>
        <button type="submit">Filter</button>
        {Object.values(filter).some(Boolean) && <button type="button" class="plain" onClick={() => go('/audit')}>Show all</button>}
      </form>
      {list.problem && <Fault problem={list.problem} retry={list.reload} />}
      {!list.value && !list.problem ? <Loading what="the audit log" /> : all.length === 0 && !list.problem ? <Empty title="Nothing is recorded for this." /> : (
        <div class="card flush scroll" tabIndex={0} role="region" aria-label="Audit entries">
          <table id="entries">
            <thead><tr><th scope="col">When</th><th scope="col">What</th><th scope="col">Worker</th><th scope="col">By</th><th scope="col">Details</th></tr></thead>
            <tbody>
              {all.map((e) => (
                <tr key={`${e.id}/${e.at}/${e.action}`} data-entry={e.id}>
                  <td class="nowrap"><Time at={e.at} /></td>
                  <td><strong>{words(e.action)}</strong></td>
                  <td>{e.worker_id ? <a href={`/workers/${encodeURIComponent(e.worker_id)}`}>{e.worker_name || e.worker_id}</a> : <span class="muted">–</span>}</td>
                  <td>{e.by.name} <span class="muted small">{e.by.kind}</span></td>
                  <td class="muted">{[e.from && e.to && e.from !== e.to ? `${e.from} to ${e.to}` : '', words(e.reason), e.detail ?? ''].filter(Boolean).join('; ')}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </>
  )
}

const same = (a: Entry, b: Entry) => a.id === b.id && a.at === b.at && a.action === b.action && a.worker_id === b.worker_id
