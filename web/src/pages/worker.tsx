import type { PageProps } from '../app'
import { Worker } from '../api'
import { useResource } from '../resource'
import { Fault, Loading } from '../ui'

export function WorkerPage(p: PageProps) {
  const id = p.place.path[1] ?? ''
  const w = useResource<Worker>(id ? `/workers/${encodeURIComponent(id)}` : null, { on: (e) => e.worker_id === id })
  if (!w.value) return w.problem ? <Fault problem={w.problem} retry={w.reload} /> : <Loading what="the worker" />
  return <h1>{w.value.name}</h1>
}
