// Paths of pages. Links are plain links; a click on one changes the page
// without loading it again.

import { useEffect, useLayoutEffect, useState } from 'preact/hooks'

const moved = new Set<() => void>()

export function go(path: string, replace = false) {
  if (path === location.pathname + location.search) return
  history[replace ? 'replaceState' : 'pushState'](null, '', path)
  for (const f of moved) f()
}

window.addEventListener('popstate', () => { for (const f of moved) f() })

document.addEventListener('click', (e) => {
  const a = (e.target as Element).closest?.('a')
  if (!a || e.defaultPrevented || e.button !== 0 || e.metaKey || e.ctrlKey || e.shiftKey || e.altKey) return
  if (a.origin !== location.origin || a.target || a.hasAttribute('download') || a.pathname.startsWith('/api/') || a.pathname.startsWith('/auth/') || a.pathname === '/docs' || a.hash || a.getAttribute('href')?.startsWith('http')) return
  e.preventDefault()
  go(a.pathname + a.search)
  window.scrollTo(0, 0)
})

export interface Place { path: string[]; query: URLSearchParams }

/** What every page is given. */
export interface PageProps { place: Place; role: string; operator: boolean }

function here(): Place {
  return { path: location.pathname.split('/').filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(location.search) }
}

export function usePlace(): Place {
  const [place, set] = useState(here)
  useLayoutEffect(() => { // before any effect of a child goes elsewhere
    const f = () => set(here())
    moved.add(f)
    return () => { moved.delete(f) }
  }, [])
  return place
}

/** Names the tab after what the page shows. */
export function useTitle(name: string | undefined) {
  useEffect(() => { if (name) document.title = `${name} · lull` }, [name])
}
