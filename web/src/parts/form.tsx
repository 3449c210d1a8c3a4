// Dialogs with a form.

import { ComponentChildren } from 'preact'
import { useState } from 'preact/hooks'
import { Problem } from '../api'
import { parseMinutes } from '../time'
import { Dialog, Fault, say } from './ui'

/** A dialog with a form. It shows errors and stays open until the form is accepted. */
export function Form(p: { title: string; submit: string; onClose: () => void; send: (f: FormData) => Promise<string>; children: ComponentChildren; danger?: boolean; ready?: boolean; wide?: boolean; also?: ComponentChildren }) {
  const [problem, setProblem] = useState<Problem | null>(null)
  const [busy, setBusy] = useState(false)
  const ready = p.ready !== false && !busy
  const send = async (e: SubmitEvent) => {
    e.preventDefault()
    if (!ready) return
    setBusy(true)
    setProblem(null)
    try {
      const done = await p.send(new FormData(e.currentTarget as HTMLFormElement))
      if (done) say(done)
      p.onClose()
    } catch (err) {
      setProblem(err instanceof Problem ? err : new Problem(0, '', err instanceof Error ? err.message : String(err)))
    } finally {
      setBusy(false)
    }
  }
  return (
    <Dialog title={p.title} onClose={p.onClose} wide={p.wide}>
      <form class="stack" onSubmit={send}>
        {p.children}
        {problem && <Fault problem={problem} what="Not saved." />}
        <div class="actions">{p.also}<button type="button" onClick={p.onClose}>Cancel</button><button type="submit" class={p.danger ? 'danger' : 'primary'} aria-disabled={!ready}>{p.submit}</button></div>
      </form>
    </Dialog>
  )
}

/** The trimmed value of a field, '' if it is not there. */
export const text = (f: FormData, name: string) => String(f.get(name) ?? '').trim()

/** The minutes of a duration field; undefined if it is empty. Throws on what is not a duration. */
export function durationOf(f: FormData, name: string, label: string): number | undefined {
  const given = text(f, name)
  if (given === '') return undefined
  const m = parseMinutes(given)
  if (m === null) throw new Problem(0, '', `${label}: invalid duration "${given}". Use a format such as 45 min or 1h 30m.`)
  return Math.round(m)
}
