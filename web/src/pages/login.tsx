import { useEffect, useLayoutEffect, useRef, useState } from 'preact/hooks'
import { session } from '../api'

export function Login() {
  const [token, setToken] = useState('')
  const [fault, setFault] = useState('')
  const [busy, setBusy] = useState(false)
  const field = useRef<HTMLInputElement>(null)
  const [issuer, setIssuer] = useState<{ name: string; login: string } | null>(null)
  useEffect(() => {
    fetch('/api/v1/auth').then((r) => (r.ok ? r.json() : {})).then((a: { issuer?: string; login?: string }) => {
      if (a.issuer && a.login) setIssuer({ name: new URL(a.issuer).hostname, login: a.login })
    }).catch(() => {}) // signing in with a token still works
  }, [])
  useLayoutEffect(() => field.current?.focus(), [])
  const enter = async (e: Event) => {
    e.preventDefault()
    const given = token.trim()
    if (!given || busy) return
    setBusy(true)
    setFault('')
    try {
      const res = await fetch('/sign-in', { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ token: given }) })
      const d = (await res.json().catch(() => ({}))) as { session?: string; detail?: string }
      if (d.session) session.set(d.session)
      else setFault(res.status === 401 ? 'This token is unknown, expired or revoked.' : d.detail ?? `The server responded with ${res.status}.`)
    } catch {
      setFault('The server is not responding.')
    } finally {
      setBusy(false)
    }
  }
  return (
    <main class="login">
      <form onSubmit={enter} class="card" aria-describedby="login-help">
        <h1>lull</h1>
        <p id="login-help">Sign in with a token. The server printed one when it first started. To create more, run <code>lull token create</code>.</p>
        <label for="token">Token</label>
        <input ref={field} id="token" type="password" autoComplete="off" spellcheck={false} value={token} onInput={(e) => setToken(e.currentTarget.value)} aria-invalid={fault ? true : undefined} aria-describedby={fault ? 'login-fault' : undefined} />
        {fault && <p id="login-fault" class="fault" role="alert">{fault}</p>}
        <button type="submit" class="primary" aria-disabled={busy}>Sign in</button>
        {issuer && <><p class="or muted small">or</p><a class="button" href={issuer.login}>Sign in with {issuer.name}</a></>}
        <p class="muted small">You stay signed in, in all tabs, until you sign out or close the browser.</p>
      </form>
    </main>
  )
}
