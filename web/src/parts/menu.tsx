// A button that opens a menu.

import { ComponentChildren } from 'preact'
import { useId, useLayoutEffect, useRef, useState } from 'preact/hooks'

export interface MenuItem { label: string; run?: () => void; href?: string; external?: boolean; danger?: boolean; checked?: boolean; /** Why it is disabled; empty if it is not. */ why?: string }

/** null is a line between groups. */
export type MenuItems = (MenuItem | null)[]

/** The list is in the top layer, so that nothing clips it. Arrow keys move, Escape closes. */
export function Menu(p: { label: string; children: ComponentChildren; items: MenuItems; kind?: string; tab?: boolean; stays?: boolean }) {
  const [open, setOpen] = useState(false)
  const button = useRef<HTMLButtonElement>(null), list = useRef<HTMLDivElement>(null)
  const id = useId()
  const wasOpen = useRef(false) // before a press, which closes a menu by itself
  useLayoutEffect(() => {
    const el = list.current
    if (!open || !el || !button.current) return
    el.showPopover()
    const at = button.current.getBoundingClientRect(), size = el.getBoundingClientRect()
    el.style.left = `${Math.max(8, Math.min(at.left, innerWidth - size.width - 8))}px`
    el.style.top = `${at.bottom + size.height + 8 > innerHeight && at.top > size.height ? at.top - size.height - 4 : at.bottom + 4}px`
    ;(el.querySelector('[role^=menuitem]') as HTMLElement | null)?.focus()
    const close = () => setOpen(false)
    addEventListener('scroll', close, { once: true, passive: true })
    addEventListener('resize', close, { once: true })
    return () => { removeEventListener('scroll', close); removeEventListener('resize', close) }
  }, [open])
  const keys = (e: KeyboardEvent) => {
    const all = [...list.current!.querySelectorAll<HTMLElement>('[role^=menuitem]')]
    const at = all.indexOf(document.activeElement as HTMLElement)
    const to = { ArrowDown: (at + 1) % all.length, ArrowUp: (at - 1 + all.length) % all.length, Home: 0, End: all.length - 1 }[e.key]
    if (e.key === 'Tab' || e.key === 'Escape') { setOpen(false); button.current?.focus(); if (e.key === 'Escape') e.preventDefault() }
    e.stopPropagation()
    if (to === undefined) return
    e.preventDefault()
    all[to]?.focus()
  }
  const choose = (i: MenuItem) => {
    if (i.why) return
    if (!p.stays) { setOpen(false); button.current?.focus() }
    i.run?.()
  }
  const role = p.items.some((i) => i?.checked !== undefined) ? 'menuitemcheckbox' : 'menuitem'
  return (
    <>
      <button ref={button} type="button" class={p.kind ?? ''} aria-haspopup="menu" aria-expanded={open} aria-label={p.label} tabIndex={p.tab === false ? -1 : undefined} onPointerDown={() => { wasOpen.current = open }} onClick={(e) => { e.stopPropagation(); setOpen(!(e.detail === 0 ? open : wasOpen.current)) }}>{p.children}</button>
      {open && (
        <div ref={list} id={id} class="menu" role="menu" aria-label={p.label} popover="auto" onKeyDown={keys} onToggle={(e) => { if ((e as ToggleEvent).newState === 'closed') setOpen(false) }} onClick={(e) => e.stopPropagation()}>
          {p.items.map((i, n) => i === null ? <hr key={n} /> : i.href && !i.why
            ? <a key={n} role="menuitem" tabIndex={-1} href={i.href} {...(i.external ? { target: '_blank', rel: 'noreferrer noopener' } : {})} onClick={() => setOpen(false)}>{i.label}{i.external && <span aria-hidden="true"> ↗</span>}</a>
            : <button key={n} type="button" role={role} aria-checked={i.checked} aria-disabled={i.why ? true : undefined} title={i.why || undefined} tabIndex={-1} class={i.danger ? 'dangerous' : ''} onClick={() => choose(i)}>{role === 'menuitemcheckbox' && <span class="tick" aria-hidden="true">{i.checked ? '✓' : ''}</span>}{i.label}</button>)}
        </div>
      )}
    </>
  )
}
