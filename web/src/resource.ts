// Reading from the server, and staying up to date.

import { useEffect, useRef, useState } from 'preact/hooks'
import { ask, Entry, Problem } from './api'
import { onEvent, onReset } from './live'

export interface Resource<T> {
  value: T | undefined
  problem: Problem | undefined
  loading: boolean
  reload: () => void
  /** Takes over what a command answered, unless something newer is known. */
  put: (value: T, revision: number) => void
}

export interface Options<T> {
  /** Which events make it out of date; without it only every does. */
  on?: (e: Entry) => boolean
  /** Milliseconds between two reads, for values that change without an event. */
  every?: number
  /** The revision of a value that does not have it in its ETag. */
  revision?: (v: T) => number
}

/** Minimum milliseconds between two reads that events cause. */
const gap = 400

/**
 * useResource reads a path and reads it again when it is out of date. What is
 * older than what is shown never takes its place: neither an answer to an
 * earlier question nor one of a lower revision. An answer that does not have
 * yet what an event announced is asked for again.
 */
export function useResource<T>(path: string | null, o: Options<T> = {}): Resource<T> {
  const [, redraw] = useState(0)
  const s = useRef<{ path: string | null; value?: T; revision: number; problem?: Problem; asked: number; shown: number; wanted: number; loading: boolean }>({
    path: null, revision: 0, asked: 0, shown: 0, wanted: 0, loading: false })
  const options = useRef(o)
  options.current = o
  const reload = useRef<() => void>(() => {})

  useEffect(() => {
    const c = s.current
    if (c.path !== path) Object.assign(c, { path, value: undefined, revision: 0, problem: undefined, wanted: 0 })
    if (path === null) return
    const control = new AbortController()
    let timer = 0, at = 0, tries = 0, failures = 0
    const look = async () => {
      clearTimeout(timer)
      timer = 0
      at = Date.now()
      const number = ++c.asked
      c.loading = true
      try {
        const a = await ask<T>('GET', path, undefined, control.signal)
        if (control.signal.aborted) return
        failures = 0
        const revision = options.current.revision?.(a.value) ?? a.revision
        if (number > c.shown && (revision === 0 || revision >= c.revision)) {
          Object.assign(c, { value: a.value, revision: Math.max(c.revision, revision), problem: undefined, shown: number })
        }
        tries = revision > 0 && revision < c.wanted ? tries + 1 : 0
        if (tries > 0 && tries < 20) soon(100 * tries)
      } catch (e) {
        if (control.signal.aborted) return
        const problem = e instanceof Problem ? e : new Problem(0, '', String(e))
        if (number > c.shown) c.problem = problem
        if (problem.status === 0 || problem.status >= 500) soon(Math.min(15_000, 1000 * 2 ** failures++))
      }
      if (number === c.asked) c.loading = false
      redraw((n) => n + 1)
      if (options.current.every && !timer) soon(options.current.every)
    }
    const soon = (ms: number) => {
      clearTimeout(timer)
      timer = window.setTimeout(look, ms)
    }
    reload.current = look
    void look()
    const offEvent = onEvent((e) => {
      if (!options.current.on?.(e)) return
      c.wanted = Math.max(c.wanted, e.id)
      soon(Math.max(0, at + gap - Date.now()))
    })
    const offReset = onReset(() => soon(0))
    const seen = () => { if (!document.hidden && options.current.every) soon(0) }
    document.addEventListener('visibilitychange', seen)
    return () => {
      control.abort()
      clearTimeout(timer)
      offEvent()
      offReset()
      document.removeEventListener('visibilitychange', seen)
    }
  }, [path])

  const c = s.current
  const current = c.path === path
  return {
    value: current ? c.value : undefined, problem: current ? c.problem : undefined, loading: c.loading,
    reload: () => reload.current(),
    put: (value, revision) => {
      if (revision < c.revision) return
      Object.assign(c, { value, revision, shown: ++c.asked })
      redraw((n) => n + 1)
    },
  }
}
