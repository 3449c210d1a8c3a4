// Dialogs with a form.

import { ComponentChildren } from 'preact'
import { useState } from 'preact/hooks'
import { Problem } from '../api'
import { attempt, Dialog, Fault } from './ui'

/** A dialog with a form: it says what is wrong and stays until it is right. */
export function Form(p: { title: string; submit: string; onClose: () => void; send: (f: FormData) => Promise<string>; children: ComponentChildren }) {
  const [problem, setProblem] = useState<Problem | null>(null)
  const [busy, setBusy] = useState(false)
  const send = async (e: SubmitEvent) => {
    e.preventDefault()
    if (busy) return
    setBusy(true)
    setProblem(null)
    try {
      const done = await p.send(new FormData(e.currentTarget as HTMLFormElement))
      await attempt(done, async () => {})
      p.onClose()
    } catch (err) {
      setProblem(err instanceof Problem ? err : new Problem(0, '', err instanceof Error ? err.message : String(err)))
    } finally {
      setBusy(false)
    }
  }
  return (
    <Dialog title={p.title} onClose={p.onClose}>
      <form class="stack" onSubmit={send}>
        {p.children}
        {problem && <Fault problem={problem} what="Nothing is changed." />}
        <div class="actions"><button type="button" onClick={p.onClose}>Cancel</button><button type="submit" class="primary" aria-disabled={busy}>{p.submit}</button></div>
      </form>
    </Dialog>
  )
}

/** The trimmed value of a field, '' if it is not there. */
export const text = (f: FormData, name: string) => String(f.get(name) ?? '').trim()
