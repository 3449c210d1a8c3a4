// Savings: hours and money avoided by pauses, and the remaining idle hours by
// cause.

import { useMemo, useState } from 'preact/hooks'
import { ask, Problem } from '../api'
import type { PageProps } from '../router'
import { hours, saved, saveFile, Savings, Sum, unknownMoney, usd, usdShort } from '../evidence'
import { useResource } from '../resource'
import { go } from '../router'
import { clock, minutes } from '../time'
import { Chart } from '../parts/chart'
import { HeatMap } from '../parts/heat'
import { attempt, Button, Card, Empty, Fault, Loading, words } from '../parts/ui'

/** Why idle workers keep running, and what to do about it, by block code. */
const causes: Record<string, [title: string, help: string]> = {
  not_idle_yet: ['Waiting for the idle timeout', 'A shorter timeout saves more. A preview shows how much.'],
  recent_activity: ['Waiting for the idle timeout', 'A shorter timeout saves more. A preview shows how much.'],
  warning_pending: ['Warned, about to pause', 'The time users have to answer a warning.'],
  about_to_be_paused: ['About to be paused', 'Between the verdict and the stop.'],
  lease_held: ['Lease', 'A user or a job keeps it running.'],
  in_snooze_period: ['Snoozed', 'A shorter snooze after resume saves more.'],
  signal_unknown: ['Unknown signal', 'Unknown never counts as idle. Fix the source to allow pauses.'],
  not_recorded: ['Not recorded', 'lull was not running, or records are missing.'],
  auto_pause_disabled: ['Automatic pauses are off', 'Turn them on in the settings or the policy.'],
  detection_disabled: ['Idle detection is off', 'Turn it on for the worker or in its policy.'],
  shadow: ['Dry run', 'Arm the worker to allow pauses.'],
  schedule: ['Schedule', 'Its open hours keep it running.'],
  connection_open: ['Open connection', ''],
  min_workers: ['Minimum number of workers', ''],
  budget: ['Budget used up', 'Budgets spread stops over time.'],
  halted: ['Halted', 'Lift the halt to allow pauses.'],
}

/** Days of a period, and the periods that it is shown in. */
const spans: [days: number, every: string, text: string][] = [[1, '', 'day'], [7, 'day', '7 days'], [30, 'day', '30 days'], [90, 'week', '90 days']]

const zone = Intl.DateTimeFormat().resolvedOptions().timeZone

const days = ['Sunday', 'Monday', 'Tuesday', 'Wednesday', 'Thursday', 'Friday', 'Saturday']

export function SavingsPage(p: PageProps) {
  const q = p.place.query
  const by = q.get('by') ?? 'worker', back = spans.find(([n]) => n === Number(q.get('days')))?.[0] ?? 30
  const [tag, setTag] = useState(by.startsWith('tag:') ? by.slice(4) : '')
  const [from, setFrom] = useState(() => start(back))
  const set = (nextBy: string, nextDays: number) => {
    setFrom(start(nextDays))
    go(`/savings?by=${encodeURIComponent(nextBy)}&days=${nextDays}`, true)
  }
  const [whose, setWhose] = useState('')
  const every = spans.find(([n]) => n === back)?.[1] ?? 'day'
  const asked = { by, from, time_zone: zone, idle_by: by, idle_limit: '100' }
  const r = useResource<Savings>(`/savings?${new URLSearchParams(asked)}`)
  // Of each day or week only the total is shown, so that any number of workers has room.
  const total = useResource<Savings>(every ? `/savings?${new URLSearchParams({ by: 'region', from, time_zone: zone, idle: 'false', every })}` : null).value
  const s = r.value
  const save = (kind: 'csv' | 'json') => attempt('', async () => {
    let all = s!
    try {
      if (every) all = (await ask<Savings>('GET', `/savings?${new URLSearchParams({ ...asked, every })}`)).value
    } catch (e) {
      if (!(e instanceof Problem && e.status === 422)) throw e // too many groups for each period
    }
    saveFile(`savings-${by.replace(':', '-')}.${kind}`, new Blob([kind === 'csv' ? csv(all) : JSON.stringify(all, null, 2)], { type: kind === 'csv' ? 'text/csv' : 'application/json' }))
  }).then(() => {})
  return (
    <>
      <h1>Savings</h1>
      <p class="headline">Hours and money saved by pauses, and the idle time that remains.</p>
      <form class="filters" onSubmit={(e) => { e.preventDefault(); if (tag.trim()) set('tag:' + tag.trim(), back) }}>
        <label>Group by{' '}
          <select value={by.startsWith('tag:') ? 'tag' : by} onChange={(e) => { const v = e.currentTarget.value; if (v === 'tag') { setTag('team'); set('tag:team', back) } else set(v, back) }}>
            {['worker', 'policy', 'region', 'instance_type', 'tag'].map((x) => <option key={x} value={x}>{words(x)}</option>)}
          </select>
        </label>
        {by.startsWith('tag:') && <label>Tag <input value={tag} maxLength={128} onInput={(e) => setTag(e.currentTarget.value)} onBlur={() => tag.trim() && 'tag:' + tag.trim() !== by && set('tag:' + tag.trim(), back)} /></label>}
        <label>Last{' '}
          <select value={String(back)} onChange={(e) => set(by, Number(e.currentTarget.value))}>
            {spans.map(([n, , text]) => <option key={n} value={n}>{text}</option>)}
          </select>
        </label>
        {s && <span class="exports"><Button onClick={() => save('csv')}>Export CSV</Button> <Button onClick={() => save('json')}>Export JSON</Button></span>}
      </form>
      {r.problem && <Fault problem={r.problem} retry={r.reload} />}
      {!s ? !r.problem && <Loading what="the savings" /> : s.total.workers === 0 ? <Empty title="No workers yet">Workers appear here from the day they are added.</Empty> : <Shown s={s} total={total} whose={whose} setWhose={setWhose} every={every} />}
    </>
  )
}

/** Prices that the server's table lacks, and how to add them. */
function MissingPrices(p: { s: Savings }) {
  return (
    <Card title="Missing prices" class="flush">
      <div class="scroll" tabIndex={0} role="region" aria-label="Missing prices" data-testid="missing-prices">
        <table>
          <thead><tr><th scope="col">Type</th><th scope="col">Region</th><th scope="col">Kind</th><th scope="col">Workers</th><th scope="col">Avoided</th></tr></thead>
          <tbody>{p.s.missing_prices.slice(0, 200).map((m) => <tr key={`${m.kind}/${m.aws_region}/${m.name}`} data-kind={m.kind} data-region={m.aws_region} data-name={m.name}><th scope="row">{m.name}</th><td>{m.aws_region}</td><td>{m.kind}</td><td>{m.workers.toLocaleString('en')}</td><td>{hours(m.avoided_hours)}</td></tr>)}</tbody>
        </table>
      </div>
      <p class="muted small">To add them, start the server with a price table that replaces the built-in one: <code>lull server --prices FILE</code> (<code>kind,region,name,usd,as_of</code>).</p>
    </Card>
  )
}

/** The periods since there was a worker. */
function held(s: Savings) {
  const all = s.periods ?? []
  return all.slice(Math.max(0, all.findIndex((x) => x.total.workers > 0)))
}

/** Days of data below which no rate is shown. */
const enoughDays = 1

/** Idle hours by cause, the most first; codes that mean the same to a reader are one. */
function byCause(idle: Record<string, number>): [code: string, hours: number, title: string][] {
  const sums = new Map<string, [string, number, string]>()
  for (const [code, h] of Object.entries(idle)) {
    const title = causes[code]?.[0] ?? words(code)
    const old = sums.get(title)
    if (old) old[1] += h
    else sums.set(title, [code, h, title])
  }
  return [...sums.values()].sort((a, b) => b[1] - a[1])
}

const grouping = (by: string) => words(by.replace(':', ' '))

const start = (days: number) => new Date(Date.now() - days * 86_400_000).toISOString()

function Shown(p: { s: Savings; total: Savings | undefined; every: string; whose: string; setWhose: (key: string) => void }) {
  const { s } = p
  const t = s.total
  const lost = byCause(s.idle_hours_not_avoided)
  const early = s.days < enoughDays
  const idle = lost.reduce((n, [, h]) => n + h, 0)
  const most = Math.max(...lost.map(([, h]) => h), 1e-9)
  const groups = s.groups ?? []
  const [many, setMany] = useState(25)
  return (
    <>
      {early && <p class="note" data-testid="early" role="status"><span><strong>Not enough data yet.</strong> lull has watched {t.workers.toLocaleString('en')} worker{t.workers === 1 ? '' : 's'} for {minutes(s.days * 1440)}. Daily savings and weekly patterns appear after one day.</span></p>}
      <div class="tiles sums">
        <Figure value={t.saved_usd === null && t.avoided_hours === 0 ? '–' : saved(t)} text="saved" note={t.saved_usd === null ? (t.avoided_hours > 0 ? unknownMoney(t) : 'lull has not stopped anything yet') : early ? 'after storage cost' : `${usd(t.saved_usd / s.days)} a day, after storage cost`} />
        <Figure value={hours(t.avoided_hours)} text="avoided" note={`of ${hours(t.avoided_hours + t.running_hours)} across ${t.workers.toLocaleString('en')} worker${t.workers === 1 ? '' : 's'}`} />
        <Figure value={hours(t.running_hours)} text="running" note={t.other_stopped_hours > 0 ? `${hours(t.other_stopped_hours)} stopped manually` : 'no manual stops'} />
        <Figure value={hours(idle)} text="idle while running" note="by cause below" />
      </div>
      {!early && p.total && held(p.total).length > 1 && <Periods s={p.total} every={p.every} />}
      {!early && s.by === 'worker' && (s.idle ?? []).length > 0 && <Card title="Idle time by worker and hour of the week" aside={<span class="muted small">{zone}</span>}><HeatMap rows={s.idle!} groups={s.idle_groups ?? 0} /></Card>}
      <Card title={`By ${grouping(s.by)}`} class="flush" aside={<span class="muted small">{clock(s.from, Date.now())} to {clock(s.to, Date.now())}</span>}>
        <div class="scroll" tabIndex={0} role="region" aria-label={`Savings by ${grouping(s.by)}`}>
          <table class="numbers sumtable">
            <thead><tr><th scope="col">{s.by.startsWith('tag:') ? `Tag ${s.by.slice(4)}` : grouping(s.by).replace(/^./, (c) => c.toUpperCase())}</th><th scope="col">Running</th><th scope="col">Avoided</th><th scope="col">Compute</th><th scope="col">Storage paid</th><th scope="col">Saved</th></tr></thead>
            <tbody>{groups.slice(0, many).map((g) => <Row key={g.key} g={g} worker={s.by === 'worker'} />)}</tbody>
            {groups.length > 1 && <tfoot><Row g={{ ...t, name: 'All', key: '' }} worker={false} /></tfoot>}
          </table>
        </div>
        {groups.length > many && <div class="actions more"><button type="button" onClick={() => setMany(many + 100)}>Show more of {groups.length.toLocaleString('en')}</button></div>}
        {s.by === 'policy' && <p class="muted small">Stops are attributed to the policy in force when they were decided, where that is recorded; otherwise to the current policy.</p>}
        {unknownMoney(t) && <p class="muted small">{unknownMoney(t)}. Unknown amounts are not counted.</p>}
      </Card>
      {s.missing_prices?.length > 0 && <MissingPrices s={s} />}
      <div class="columns even">
        <Card title="Remaining idle time by cause">
          {lost.length === 0 ? <p class="muted">No idle time recorded.</p> : (
            <ul class="causes">
              {lost.map(([code, h, title]) => (
                <li key={code}>
                  <span class="what"><strong>{title}</strong><span>{hours(h)}</span></span>
                  <span class={`meter ${code === 'signal_unknown' || code === 'not_recorded' ? 'unknown' : ''}`} aria-hidden="true"><span style={{ width: `${(h / most) * 100}%` }} /></span>
                  {causes[code]?.[1] && <span class="muted small">{causes[code]![1]}</span>}
                </li>
              ))}
            </ul>
          )}
          <p class="small"><a href="/preview">Preview a policy</a></p>
        </Card>
        {!early && <Week s={s} whose={p.whose} setWhose={p.setWhose} />}
      </div>
    </>
  )
}

function Figure(p: { value: string; text: string; note: string }) {
  return <div class="tile figure"><span class="count">{p.value}</span><span>{p.text}</span><span class="muted small">{p.note}</span></div>
}

function Row(p: { g: Sum; worker: boolean }) {
  const { g } = p
  const name = g.name || g.key || 'none'
  const cell = (v: number | null) => (v === null ? <span class="muted">{g.avoided_hours > 0 ? 'unknown' : '–'}</span> : usd(v))
  return (
    <tr>
      <th scope="row">{p.worker ? <a href={`/workers/${encodeURIComponent(g.key)}`}>{name}</a> : name}{!p.worker && <span class="muted small"> {g.workers.toLocaleString('en')} worker{g.workers === 1 ? '' : 's'}</span>}</th>
      <td>{hours(g.running_hours)}</td><td>{hours(g.avoided_hours)}</td><td>{cell(g.compute_saved_usd)}</td><td>{cell(g.storage_paid_usd)}</td><td><strong>{g.saved_usd === null ? cell(null) : saved(g)}</strong></td>
    </tr>
  )
}

/** Savings of each day or week. */
function Periods(p: { s: Savings; every: string }) {
  const all = held(p.s)
  const money = all.some((x) => x.total.saved_usd !== null)
  // Where nothing was avoided, nothing was saved; where it has no price, it is unknown.
  const series = useMemo(() => [{ name: money ? 'Saved' : 'Avoided', spans: all.map((x) => ({ at: new Date(x.from).getTime(), until: new Date(x.to).getTime(), value: money ? (x.total.avoided_hours === 0 ? 0 : x.total.saved_usd) : x.total.avoided_hours })) }], [p.s])
  const spans = series[0]!.spans
  return (
    <Card title={`Savings per ${p.every}`}>
      <Chart name={money ? 'Saved' : 'Hours avoided'} bars from={spans[0]!.at} to={spans[spans.length - 1]!.until} series={series} format={money ? usd : hours} axis={money ? usdShort : undefined} aside={money && all.some((x) => x.total.unpriced_hours > 0 || x.total.unknown_storage_hours > 0) ? 'lower bound: some hours have no price' : undefined} />
    </Card>
  )
}

/** Idle hours by hour of the week, in the browser's time zone. */
function Week(p: { s: Savings; whose: string; setWhose: (key: string) => void }) {
  const groups = p.s.idle ?? []
  const chosen = groups.find((g) => g.key === p.whose)
  const all = chosen?.idle_by_hour_of_week ?? p.s.idle_by_hour_of_week
  const here = (day: number, hour: number) => all[day * 24 + hour] ?? 0
  const most = Math.max(...all)
  const order = [1, 2, 3, 4, 5, 6, 0]
  const level = (h: number) => (h <= 0 || most === 0 ? 0 : Math.min(5, 1 + Math.floor((h / most) * 4.999)))
  const size = 20, left = 38, top = 16
  const peaks = order.map((d) => {
    const all = Array.from({ length: 24 }, (_, h) => here(d, h))
    const sum = all.reduce((a, b) => a + b, 0), top = Math.max(...all)
    return { d, sum, top, at: all.indexOf(top) }
  })
  return (
    <Card title="Idle time by hour of the week" aside={<span class="muted small">{zone}</span>}>
      {groups.length > 1 && (
        <p><label>Show{' '}
          <select id="whose" value={chosen ? p.whose : ''} onChange={(e) => p.setWhose(e.currentTarget.value)}>
            <option value="">all</option>
            {groups.slice(0, 200).map((g) => <option key={g.key} value={g.key}>{g.name || g.key || 'none'}</option>)}
          </select>
        </label></p>
      )}
      {most === 0 ? <p class="muted">No idle time recorded.</p> : (
        <>
          <svg class="heat" viewBox={`0 0 ${left + 24 * size} ${top + 7 * size}`} aria-hidden="true">
            {[0, 6, 12, 18].map((h) => <text key={h} x={left + h * size} y={11}>{`${String(h).padStart(2, '0')}:00`}</text>)}
            {order.map((d, row) => (
              <g key={d}>
                <text x={left - 8} y={top + row * size + 14} text-anchor="end">{days[d]!.slice(0, 3)}</text>
                {Array.from({ length: 24 }, (_, h) => <rect key={h} class={`l${level(here(d, h))}`} x={left + h * size} y={top + row * size} width={size - 2} height={size - 2} rx={3}><title>{`${days[d]} ${String(h).padStart(2, '0')}:00: ${hours(here(d, h))}`}</title></rect>)}
              </g>
            ))}
          </svg>
          <p class="scale muted small" aria-hidden="true">none {[0, 1, 2, 3, 4, 5].map((l) => <span key={l} class={`cell l${l}`} />)} {hours(most)} in an hour of the week</p>
          <details>
            <summary>Show as table</summary>
            <table>
              <thead><tr><th scope="col">Day</th><th scope="col">Idle</th><th scope="col">Peak hour</th></tr></thead>
              <tbody>{peaks.map((x) => <tr key={x.d}><th scope="row">{days[x.d]}</th><td>{hours(x.sum)}</td><td>{x.top > 0 ? `${String(x.at).padStart(2, '0')}:00, ${hours(x.top)}` : '–'}</td></tr>)}</tbody>
            </table>
          </details>
        </>
      )}
    </Card>
  )
}

/** The groups, of each period where there are some, as lull savings --csv writes them: an empty field is unknown. */
function csv(s: Savings): string {
  const columns: (keyof Sum)[] = ['key', 'name', 'workers', 'running_hours', 'avoided_hours', 'other_stopped_hours', 'compute_saved_usd', 'unpriced_hours', 'storage_paid_usd', 'unknown_storage_hours', 'saved_usd']
  // What a spreadsheet would take for a formula is marked as text.
  const field = (v: unknown) => { const text = v === null || v === undefined ? '' : typeof v === 'string' && /^[=+\-@\t\r]/.test(v) ? `'${v}` : String(v); return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text }
  const head = ['from', 'to', s.by, ...columns.slice(1)]
  const periods = s.periods?.length ? s.periods : [s]
  return [head, ...periods.flatMap((p) => (p.groups ?? []).map((g) => [p.from, p.to, ...columns.map((c) => g[c])]))].map((row) => row.map(field).join(',')).join('\n') + '\n'
}
