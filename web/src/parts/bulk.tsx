// One action on many workers, after one confirmation.

import { useState } from 'preact/hooks'
import { WorkerRow } from '../api'
import { Menu } from './menu'
import { Dialog, say } from './ui'
import { act, Verb, verbs } from './workeractions'

/** Maximum concurrent requests. */
const atOnce = 4

export function BulkBar(p: { rows: WorkerRow[]; admin: boolean; onClear: () => void; onDone: () => void }) {
  const [verb, setVerb] = useState<Verb | null>(null)
  const usable = verbs.filter((v) => (!v.admin || p.admin) && p.rows.some(v.takes))
  const first = usable.filter((v) => ['pause', 'resume', 'snooze', 'arm'].includes(v.key))
  const rest = usable.filter((v) => !first.includes(v))
  return (
    <div class="bulk" role="group" aria-label="Actions for selected workers">
      <strong role="status">{p.rows.length.toLocaleString('en')} selected</strong>
      {first.map((v) => <button key={v.key} type="button" onClick={() => setVerb(v)}>{v.label}</button>)}
      {rest.length > 0 && <Menu label="More actions for selected workers" items={rest.map((v) => ({ label: `${v.label}…`, run: () => setVerb(v) }))}>More</Menu>}
      <button type="button" class="plain" onClick={p.onClear}>Clear selection</button>
      {verb && <Confirm verb={verb} rows={p.rows} onClose={(done) => { setVerb(null); if (done) p.onDone() }} />}
    </div>
  )
}

function Confirm(p: { verb: Verb; rows: WorkerRow[]; onClose: (done: boolean) => void }) {
  const { verb: v } = p
  const [begun, setBegun] = useState<WorkerRow[] | null>(null) // until then, the rows follow the workers' states
  const now = begun ?? p.rows.filter(v.takes)
  const [count, setCount] = useState<number | null>(null)
  const [failed, setFailed] = useState<[WorkerRow, string][]>([])
  const title = `${v.label}: ${now.length.toLocaleString('en')} worker${now.length === 1 ? '' : 's'}`
  const start = async () => {
    if (count !== null) return
    setCount(0)
    setBegun(now)
    const left = [...now], faults: [WorkerRow, string][] = []
    await Promise.all(Array.from({ length: atOnce }, async () => {
      for (let r = left.shift(); r; r = left.shift()) {
        try { await act(r, v) } catch (e) { faults.push([r, e instanceof Error ? e.message : String(e)]) }
        setCount((n) => (n ?? 0) + 1)
      }
    }))
    if (now.length > faults.length) say(`${(now.length - faults.length).toLocaleString('en')} worker${now.length - faults.length === 1 ? ' is' : 's are'} ${v.done}.`)
    setFailed(faults)
    if (faults.length === 0) p.onClose(true)
  }
  if (failed.length > 0) {
    return (
      <Dialog title={`${failed.length} of ${now.length} failed`} onClose={() => p.onClose(true)}>
        <ul class="blocks">{failed.slice(0, 20).map(([r, why]) => <li key={r.id}><strong>{r.name}</strong>: {why}</li>)}</ul>
        <div class="actions"><button type="button" class="primary" onClick={() => p.onClose(true)}>Close</button></div>
      </Dialog>
    )
  }
  return (
    <Dialog title={title} onClose={() => count === null && p.onClose(false)}>
      <p>{v.asks}</p>
      <p class="names">{now.slice(0, 12).map((r) => <span key={r.id} class="tag">{r.name}</span>)}{now.length > 12 && <span class="muted">and {(now.length - 12).toLocaleString('en')} more</span>}</p>
      {now.length < p.rows.length && <p class="muted">{p.rows.length - now.length === 1 ? '1 selected worker cannot do this now and is skipped.' : `${(p.rows.length - now.length).toLocaleString('en')} selected workers cannot do this now and are skipped.`}</p>}
      <div class="actions">
        <button type="button" aria-disabled={count !== null} onClick={() => count === null && p.onClose(false)}>Cancel</button>
        <button type="button" class="primary" aria-disabled={count !== null} onClick={start}>{count === null ? v.label : `${count} of ${now.length}…`}</button>
      </div>
    </Dialog>
  )
}
