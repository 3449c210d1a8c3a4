// The command palette, and the list of keyboard shortcuts.

import { useEffect, useId, useRef, useState } from 'preact/hooks'
import { ask, Overview, WorkerRow } from '../api'
import { go } from '../router'
import { Badge, Dialog } from './ui'
import { workerAt } from './workerdialogs'

/** A command of the palette. */
export interface Command { label: string; hint?: string; run: () => void }

export function Palette(p: { workers: boolean; commands: Command[]; onClose: () => void }) {
  const [text, setText] = useState('')
  const [at, setAt] = useState(0)
  const [found, setFound] = useState<WorkerRow[]>([])
  const list = useRef<HTMLUListElement>(null)
  const id = useId()
  const words = text.toLowerCase().split(/\s+/).filter(Boolean)
  useEffect(() => {
    if (words.length === 0 || !p.workers) { setFound([]); return }
    const control = new AbortController()
    const timer = setTimeout(() => {
      ask<Overview>('GET', `/overview?${new URLSearchParams({ q: text.trim(), limit: '8' })}`, undefined, control.signal).then((a) => setFound(a.value.items)).catch(() => {}) // the commands remain
    }, 120)
    return () => { clearTimeout(timer); control.abort() }
  }, [text])
  const matching = p.commands.filter((c) => words.every((w) => `${c.label} ${c.hint ?? ''}`.toLowerCase().includes(w)))
  const all: { key: string; row?: WorkerRow; command?: Command }[] = [...found.map((row) => ({ key: row.id, row })), ...matching.map((command) => ({ key: command.label, command }))]
  const current = Math.min(at, all.length - 1)
  useEffect(() => { list.current?.querySelector('[aria-selected=true]')?.scrollIntoView({ block: 'nearest' }) }, [current])
  const choose = (n: number) => {
    const x = all[n]
    if (!x) return
    p.onClose()
    if (x.row) go(workerAt(x.row.id))
    else queueMicrotask(() => x.command!.run()) // after the dialog gave the focus back
  }
  const keys = (e: KeyboardEvent) => {
    const to = { ArrowDown: (current + 1) % all.length, ArrowUp: (current - 1 + all.length) % all.length }[e.key]
    if (to !== undefined) { e.preventDefault(); setAt(to) }
    if (e.key === 'Enter') { e.preventDefault(); choose(current) }
  }
  return (
    <Dialog title="Command palette" onClose={p.onClose}>
      <input class="palette" {...{ role: 'combobox' } as object} aria-label="Worker, page or command" aria-expanded="true" aria-controls={id} aria-activedescendant={current >= 0 ? `${id}-${current}` : undefined} autoComplete="off" spellcheck={false} placeholder="Worker, page or command" value={text} maxLength={128} onInput={(e) => { setText(e.currentTarget.value); setAt(0) }} onKeyDown={keys} />
      <ul ref={list} id={id} class="choices" role="listbox" aria-label="Matches">
        {all.map((x, n) => (
          <li key={x.key} id={`${id}-${n}`} role="option" aria-selected={n === current} onMouseMove={() => setAt(n)} onClick={() => choose(n)}>
            {x.row ? <><span>{x.row.name} <span class="muted small">{x.row.aws_region}</span></span><Badge standing={x.row.standing} /></> : <><span>{x.command!.label}</span><span class="muted small">{x.command!.hint}</span></>}
          </li>
        ))}
      </ul>
      {all.length === 0 && <p class="muted">No matches.</p>}
    </Dialog>
  )
}

const shortcuts: [keys: string[], what: string][] = [
  [['Ctrl', 'K'], 'Go to a worker or page, or run a command'],
  [['/'], 'Search'],
  [['↓', '↑'], 'Next and previous worker'],
  [['Enter'], 'Open the worker'],
  [['x'], 'Select the worker; Shift selects a range'],
  [['Home', 'End'], 'First and last worker'],
  [['?'], 'Show shortcuts'],
  [['Esc'], 'Close'],
]

export function Shortcuts(p: { onClose: () => void }) {
  return (
    <Dialog title="Keyboard shortcuts" onClose={p.onClose}>
      <dl class="shortcuts">{shortcuts.map(([keys, what]) => <div key={what}><dt>{keys.map((k) => <kbd key={k}>{k}</kbd>)}</dt><dd>{what}</dd></div>)}</dl>
      <div class="actions"><button type="button" onClick={p.onClose}>Close</button></div>
    </Dialog>
  )
}
