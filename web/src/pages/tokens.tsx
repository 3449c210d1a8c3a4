// Access tokens: list, create and revoke.

import { useState } from 'preact/hooks'
import { ask, List, Problem, Token } from '../api'
import { DurationField } from '../parts/fields'
import { durationOf } from '../parts/form'
import type { PageProps } from '../router'
import { useResource } from '../resource'
import { attempt, Button, Dialog, Empty, Fault, Loading, Time } from '../parts/ui'

export function Tokens(p: PageProps) {
  const all = useResource<List<Token>>('/tokens?limit=1000', { on: (e) => e.action.startsWith('token_') })
  const [making, setMaking] = useState(false)
  const [ending, setEnding] = useState<Token | null>(null)
  if (p.role !== 'admin') return <><h1>Tokens</h1><Empty title="Only admins can view tokens" /></>
  const now = Date.now()
  const list = [...(all.value?.items ?? [])].reverse()
  return (
    <>
      <h1>Tokens</h1>
      <p class="headline">Access tokens of this server. A token is shown once, when it is created; only its hash is stored.</p>
      <div class="actions commands"><Button kind="primary" onClick={() => setMaking(true)}>Create token</Button></div>
      {all.problem && <Fault problem={all.problem} retry={all.reload} />}
      {!all.value && !all.problem ? <Loading what="the tokens" /> : (
        <div class="card flush scroll" tabIndex={0} role="region" aria-label="Tokens">
          <table class="asrows">
            <thead><tr><th scope="col">Name</th><th scope="col">Role</th><th scope="col">Created</th><th scope="col">Expires</th><th scope="col"><span class="hidden">Actions</span></th></tr></thead>
            <tbody>
              {list.map((t) => {
                const over = t.expires_at && new Date(t.expires_at).getTime() < now
                return (
                  <tr key={t.id} class={t.revoked_at || over ? 'over' : ''}>
                    <th scope="row">{t.name}<div class="muted small">{t.id}</div></th>
                    <td>{t.role}{t.machine && <span class="muted"> of {t.machine}</span>}</td>
                    <td><Time at={t.created_at} /> <span class="muted">by {t.created_by}</span></td>
                    <td>{t.revoked_at ? <>revoked <Time at={t.revoked_at} /> <span class="muted">by {t.revoked_by}</span></> : t.expires_at ? <Time at={t.expires_at} /> : <span class="muted">never</span>}</td>
                    <td>{!t.revoked_at && <Button kind="plain" label={`Revoke ${t.name}`} onClick={() => setEnding(t)}>Revoke</Button>}</td>
                  </tr>
                )
              })}
            </tbody>
          </table>
        </div>
      )}
      {making && <Make onClose={() => { setMaking(false); all.reload() }} />}
      {ending && (
        <Dialog title={`Revoke ${ending.name}?`} onClose={() => setEnding(null)}>
          <p>Every server rejects the token immediately. This cannot be undone.</p>
          <div class="actions">
            <button type="button" onClick={() => setEnding(null)}>Cancel</button>
            <Button kind="danger" onClick={async () => { if (await attempt(`Revoked ${ending.name}.`, () => ask('DELETE', `/tokens/${ending.id}`))) setEnding(null); all.reload() }}>Revoke</Button>
          </div>
        </Dialog>
      )}
    </>
  )
}

function Make(p: { onClose: () => void }) {
  const [made, setMade] = useState<Token | null>(null)
  const [problem, setProblem] = useState<Problem | null>(null)
  const [role, setRole] = useState('viewer')
  const make = async (e: SubmitEvent) => {
    e.preventDefault()
    const f = new FormData(e.currentTarget as HTMLFormElement)
    setProblem(null)
    try {
      const body: Record<string, unknown> = { name: f.get('name'), role }
      if (f.get('machine')) body.machine = f.get('machine')
      const minutes = durationOf(f, 'expires', 'Expires in')
      if (minutes !== undefined) body.ttl_seconds = minutes * 60
      setMade((await ask<Token>('POST', '/tokens', body)).value)
    } catch (err) {
      setProblem(err instanceof Problem ? err : new Problem(0, '', String(err)))
    }
  }
  if (made) {
    return (
      <Dialog title={`Token ${made.name}`} onClose={p.onClose}>
        <p>Copy this token now. It is not shown again.</p>
        <p><code class="secret">{made.token}</code></p>
        <div class="actions">
          <Button onClick={() => attempt('Copied.', () => navigator.clipboard.writeText(made.token ?? '')).then(() => {})}>Copy</Button>
          <button type="button" class="primary" onClick={p.onClose}>Done</button>
        </div>
      </Dialog>
    )
  }
  const machine = role === 'agent' || role === 'host'
  return (
    <Dialog title="Create token" onClose={p.onClose}>
      <form class="stack" onSubmit={make}>
        <label for="token-name">Name</label>
        <input id="token-name" name="name" required maxLength={128} />
        <label for="token-role">Role</label>
        <select id="token-role" value={role} onChange={(e) => setRole(e.currentTarget.value)}>
          <option value="viewer">viewer: view only</option>
          <option value="operator">operator: pause, resume, halt</option>
          <option value="admin">admin: full access</option>
          <option value="agent">agent: reports for one machine</option>
          <option value="host">host: reports for one machine</option>
        </select>
        {machine && <><label for="token-machine">Machine</label><input id="token-machine" name="machine" required maxLength={128} /></>}
        <DurationField id="token-expires" name="expires" label="Expires in" inherit="never" />
        {problem && <Fault problem={problem} what="The token was not created." />}
        <div class="actions"><button type="button" onClick={p.onClose}>Cancel</button><button type="submit" class="primary">Create</button></div>
      </form>
    </Dialog>
  )
}
