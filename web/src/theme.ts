// The light, dark or system theme.

import { useEffect, useState } from 'preact/hooks'

export type Theme = 'system' | 'light' | 'dark'

export function theme(): Theme {
  const t = localStorage.getItem('lull-theme')
  return t === 'light' || t === 'dark' ? t : 'system'
}

export function applyTheme() {
  const t = theme()
  if (t === 'system') delete document.documentElement.dataset.theme
  else document.documentElement.dataset.theme = t
}

const watching = new Set<() => void>()

/** Calls f after the theme was set. */
export function onTheme(f: () => void): () => void {
  watching.add(f)
  return () => { watching.delete(f) }
}

export function setTheme(t: Theme) {
  if (t === 'system') localStorage.removeItem('lull-theme')
  else localStorage.setItem('lull-theme', t)
  applyTheme()
  for (const f of watching) f()
}

/** Redraws what draws its own colors when they change, and returns how often. */
export function useTheme(): number {
  const [n, set] = useState(0)
  useEffect(() => {
    const changed = () => set((x) => x + 1)
    const scheme = matchMedia('(prefers-color-scheme: dark)')
    const off = onTheme(changed)
    scheme.addEventListener('change', changed)
    return () => { off(); scheme.removeEventListener('change', changed) }
  }, [])
  return n
}
