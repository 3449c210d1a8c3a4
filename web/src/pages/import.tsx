// Import of discovered instances into a fleet that already has workers.

import type { PageProps } from '../router'
import { go } from '../router'
import { Discovery } from '../parts/discovery'

export function ImportPage(p: PageProps) {
  return (
    <>
      <p class="crumb"><a href="/">Fleet</a></p>
      <h1>Import instances</h1>
      <p class="headline">EC2 instances that are not workers yet.</p>
      <Discovery admin={p.role === 'admin'} first={false} onImported={() => go('/')} />
    </>
  )
}
